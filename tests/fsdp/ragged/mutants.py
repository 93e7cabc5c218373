"""Mistakes in ragged tensors, each with a layout and a call that finds it."""

from __future__ import annotations

from harness.fsdp.ragged import operations, placement, reductions, tensor
from tests.support.mutants import Slip

MUTANTS = {
    "means of means": (
        Slip(
            reductions, "_sum", "/ like.numel()", "/ max(like._local_tensor.numel(), 1)", "A mean is of a rank's rows"
        ),
        "uneven",
        "p.mean()",
    ),
    "other cuts": (
        Slip(operations, "_same_cut", "mine.placements != theirs.placements or ", "", "Rows meet rows of another cut"),
        "halves",
        "p + q",
    ),
    "no rows": (
        Slip(reductions, "_least", "return -math.inf if", "return 0.0 if", "A rank without rows has one: 0"),
        "first",
        "(p - 9).max()",
    ),
    "own numbers": (
        Slip(
            operations,
            "_random",
            "like.rows_of(_first_ranks(drawn, mesh))",
            "drawn[: len(like._local_tensor)]",
            "Every rank draws the first rows' random numbers",
        ),
        "uneven",
        "p.normal_()",
    ),
    "rows in rank order": (
        Slip(
            placement.RaggedShard,
            "gather",
            "sorted(zip(self.spans, found, strict=True), key=lambda each: each[0])",
            "zip(self.spans, found, strict=True)",
            "Rows are put together in the order of ranks",
        ),
        "turned",
        "p.cumsum(1)",
    ),
    "views": (
        Slip(operations, "_view", "or size[0] % like.shape[0]", "", "A view cuts rows"),
        "uneven",
        "p.reshape(4, 6)",
    ),
    "rows alone": (
        Slip(reductions, "reduction_of", "0 not in reduced", "reduced", "A sum over rows is of this rank's rows"),
        "uneven",
        "p.sum(0)",
    ),
    "copies of whole": (
        Slip(tensor.RaggedTensor, "rows_of", "offsets[dim] if sizes[dim] else 0", "0", "All ranks take the first rows"),
        "uneven",
        "p.copy_(torch.arange(24.0).view(8, 3))",
    ),
    "edits of views": (
        Slip(operations, "_view_of_whole", "GatheredView.of(found, name)", "found", "Edits of a copy are lost"),
        "uneven",
        "p[0].zero_()",
    ),
    "plain tensors": (
        Slip(operations, "_whole", "value.numel() > 1", "False", "A rank's plain tensor is taken for all ranks'"),
        "uneven",
        "torch.ones(8, 3) + p",
    ),
    "tensor-parallel rows": (
        Slip(reductions, "reduction_of", "and like.cuts_rows_alone", "", "A row is summed over a rank's columns"),
        "tp_columns",
        "p.sum(1)",
    ),
    "short rows": (
        Slip(
            placement.RaggedShard,
            "gather",
            "padded[: len(local)] = local",
            "pass",
            "Fewer rows than the longest cut's are lost in a gather",
        ),
        "uneven",
        "p.cumsum(1)",
    ),
    "long rows": (
        Slip(
            placement.RaggedShard, "gather", "rows[: end - begin]", "rows", "What fills up a gather is taken for rows"
        ),
        "uneven",
        "p.cumsum(1)",
    ),
    "cuts of views": (
        Slip(
            placement.RaggedShard,
            "scaled",
            "(begin * factor, end * factor)",
            "(begin, end)",
            "A view has the cut of what it views",
        ),
        "uneven",
        "p.view(-1)",
    ),
    "all cuts are equal": (
        Slip(placement.RaggedShard, "__eq__", "and self.spans == other.spans", "", "Cuts of other rows are equal"),
        "uneven",
        "p + q",
    ),
    "spans of rank 0": (
        Slip(
            tensor.RaggedTensor,
            "place",
            "each.spans[here[axis]]",
            "each.spans[0]",
            "Every rank takes the first one's rows of a whole tensor",
        ),
        "uneven",
        "p.copy_(torch.arange(24.0).view(8, 3))",
    ),
    "whole meets rows": (
        Slip(
            operations,
            "_local",
            "return like.rows_of(value if",
            "return (value if",
            "A whole tensor meets the rows of a rank",
        ),
        "uneven",
        "p.copy_(torch.arange(24.0).view(8, 3))",
    ),
    "lists row by row": (
        Slip(
            operations,
            "_foreach",
            "_local(each, first) if isinstance(each, DTensor) else",
            "local_tensor(each) if isinstance(each, DTensor) else",
            "Lists of tensors that are cut otherwise meet row by row",
        ),
        "uneven",
        "torch._foreach_add([p, q], [q, p], alpha=2.0)",
    ),
    "lists stay plain": (
        Slip(
            operations,
            "_foreach",
            "wrap_rows(each, first) if isinstance(first, RaggedTensor) else each",
            "each",
            "What is made of a list of tensors is this rank's rows",
        ),
        "uneven",
        "torch._foreach_mul([p, q], 2.0)",
    ),
    "minus one": (
        Slip(
            operations,
            "_view",
            "like.numel() // max(-math.prod(size), 1)",
            "like._local_tensor.numel()",
            "-1 in a view is of a rank's elements",
        ),
        "uneven",
        "p.view(-1)",
    ),
    "expanded rows": (
        Slip(operations, "_expand", "if same and", "if True or", "What expands to other rows keeps its own"),
        "uneven",
        "p.expand(2, 8, 3)",
    ),
    "own answer": (
        Slip(
            operations,
            "_equal",
            "not extremes([differs], torch.amax)[0].item()",
            "same",
            "Whether tensors are equal is asked of a rank's rows",
        ),
        "first",
        "torch.equal(p, q)",
    ),
    "equal turned round": (
        Slip(operations, "_equal", "not same, dtype", "same, dtype", "Equal tensors differ"),
        "uneven",
        "torch.equal(p, p.clone())",
    ),
    "norms added": (
        Slip(
            reductions,
            "_norms_of",
            "else partial(norm, ord=order)",
            "else partial(torch.sum)",
            "Norms of rows are added",
        ),
        "uneven",
        "p.norm()",
    ),
    "a norm of nothing": (
        Slip(
            reductions,
            "_norms_of",
            "math.inf if order < 0 else 0",
            "math.inf if order < 0 else 1",
            "A rank without rows has a norm",
        ),
        "first",
        "p.norm()",
    ),
    "least norm of nothing": (
        Slip(reductions, "_norms_of", "math.inf if order < 0 else 0", "0", "A rank without rows has the least norm"),
        "first",
        'p.norm(-float("inf"))',
    ),
    "dtype of a sum": (
        Slip(
            reductions,
            "_sum",
            "total.to(dtype or like.dtype)",
            "total.to(like.dtype)",
            "A sum has the dtype of its tensor, whatever was asked",
        ),
        "uneven",
        "p.sum(dtype=torch.float64)",
    ),
    "kept dimensions": (
        Slip(reductions, "_shaped", "if any(keepdim)", "if False", "keepdim is forgotten"),
        "uneven",
        "p.sum((0, 1), keepdim=True)",
    ),
    "first rank's sum": (
        Slip(
            reductions,
            "_over_ranks",
            "combine(parts.view(mesh.size(axis), -1), dim=0)",
            "parts.view(mesh.size(axis), -1)[0]",
            "The first rank's sum is taken for all",
        ),
        "uneven",
        "p.sum()",
    ),
    "last rank's order": (
        Slip(
            reductions,
            "_over_ranks",
            "found[place] = value\n    return",
            "found[where[0]] = value\n    return",
            "Norms of a list are one tensor's",
        ),
        "uneven",
        "torch._foreach_norm([p, q])",
    ),
    "a TP shard for the whole": (
        Slip(
            tensor.RaggedTensor,
            "whole",
            "if not any(isinstance(placement, Shard) for placement in spec.placements[:-1]):",
            "if True:",
            "A TP shard of the tensor-parallel axis is taken for the whole",
        ),
        "tp_rows",
        "p.cumsum(1)",
    ),
    "copies edited": (
        Slip(
            tensor.GatheredView,
            "__torch_dispatch__",
            "schema_of(func).is_mutable and",
            "False and",
            "Edits of a view of a copy are lost",
        ),
        "uneven",
        "p.t().mul_(2)",
    ),
    "out elsewhere": (
        Slip(
            operations,
            "_into",
            'func(*local, **{**kwargs, "out": local_tensor(out)})',
            "pass",
            "out= is left as it was",
        ),
        "uneven",
        "torch.add(p, q, out=p)",
    ),
    "masks of others": (
        Slip(
            operations,
            "_index_put",
            "masked_fill_(_local(mask, like), _whole(value).reshape(()))",
            "masked_fill_(~_local(mask, like), _whole(value).reshape(()))",
            "A mask picks the other elements",
        ),
        "uneven",
        "p.__setitem__(p > 0, 0.5)",
    ),
    "drawn rows alone": (
        Slip(
            operations,
            "_random",
            "drawn = func(local_tensor(like).new_empty(like.shape),",
            "drawn = func(local_tensor(like).new_empty(local_tensor(like).shape),",
            "Each rank draws as many numbers as it has rows, and generators part",
        ),
        "uneven",
        "p.normal_()",
    ),
    "all means": (
        Slip(
            reductions,
            "_sum",
            "if func in (aten.mean.default, aten.mean.dim):",
            "if func is aten.mean.default:",
            "A mean over all dimensions by name is a sum",
        ),
        "uneven",
        "p.mean((0, 1))",
    ),
    "smallest of nothing": (
        Slip(reductions, "_least", "else math.inf", "else -math.inf", "A rank without rows has the smallest one"),
        "first",
        "p.min()",
    ),
    "replicas added": (
        Slip(reductions, "_over_ranks", "in enumerate(cuts) if is_cut)", "in enumerate(cuts))", "Replicas are summed"),
        "hsdp",
        "p.sum()",
    ),
    "several results": (
        Slip(
            tensor,
            "wrap_rows",
            "type(result)(wrap_rows(each, like, cut) for each in result)",
            "result",
            "Of several results each is this rank's rows",
        ),
        "uneven",
        "tuple(p.max(1))",
    ),
    "numbers of lists": (
        Slip(
            operations,
            "_foreach",
            "return _whole(value) if isinstance(value, Tensor) else value",
            "return value",
            "A number that all ranks have stays a DTensor in a list's operation",
        ),
        "uneven",
        "torch._foreach_div_([p], q.norm())",
    ),
    "plain rows": (
        Slip(
            tensor,
            "wrap_rows",
            "return RaggedTensor.of(result, spec)\n    rows",
            "return result\n    rows",
            "What is computed row by row is plain",
        ),
        "uneven",
        "p * 2",
    ),
    "zero norms": (
        Slip(reductions, "_norms_of", "if order == 0 else", "if order == 1 else", "Norms of order 0 are not added"),
        "uneven",
        "p.norm(0)",
    ),
    "least for largest": (
        Slip(reductions, "largest", "torch.amax", "torch.amin", "The largest of a list's tensors are their least"),
        "uneven",
        "torch._foreach_max([p, q])",
    ),
}
