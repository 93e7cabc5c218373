"use strict";
// A click on a head sorts its table by that column; another one turns the order round. What is missing stays last.
for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, column) => {
    const cell = row.cells[column];
    if (!("key" in cell.dataset)) return null;
    return cell.classList.contains("number") ? Number(cell.dataset.key) : cell.dataset.key;
  };
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      const order = (left, right) => {
        const a = key(left, column), b = key(right, column);
        if (a === null || b === null) return (a === null) - (b === null);
        const numbers = typeof a === "number" && typeof b === "number";
        const compared = numbers ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
        return sign * (Number.isNaN(compared) ? 0 : compared);
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
    });
  });
}
