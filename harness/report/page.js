"use strict";
// A click on a head sorts its table by that column; another one turns the order round. What is missing stays last.
const NUMBER = /^([-+]?\d[\d.]*(?:e[-+]?\d+)?|-?inf|nan)( %|\/\d+)?$/;
const valueOf = (cell) => {
  const found = NUMBER.exec(cell.textContent);
  if (!found) return cell.textContent || null;
  return Number(found[1].replace("inf", "Infinity")) / (found[2] === " %" ? 100 : 1);
};
for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.tHead.rows[0].cells];
  for (const cell of table.tBodies[0].querySelectorAll("td")) {
    if (typeof valueOf(cell) !== "number") continue;
    cell.classList.add("number");
    heads[cell.cellIndex].classList.add("number");
  }
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      const order = (left, right) => {
        const [a, b] = [left, right].map((row) => valueOf(row.cells[column]));
        if (a === null || b === null) return (a === null) - (b === null);
        const numbers = typeof a === "number" && typeof b === "number";
        const compared = numbers ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
        return sign * (Number.isNaN(compared) ? 0 : compared);
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
    });
  });
}
