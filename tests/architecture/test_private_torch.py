"""Private names of torch stand in one file, and importing the engine needs none of them."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from harness import private_torch
from harness.private_torch import NAMES, OVERRIDDEN, MissingName

ROOT = Path(__file__).parents[2]
ENGINE = ("fsdp", "fp8", "shm", "watchdog")
MOST = 27
"""Of private names; three of them are used before torch 2.12 alone."""
PYTHONS = {"_fields", "_replace", "_value_", "_getframe", "_current_frames"}
"""Of named tuples, enumerations and `sys`."""
FILES = [path for package in ENGINE for path in sorted((ROOT / "harness" / package).rglob("*.py"))]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names() -> set[str]:
    """What the engine's sources define or assign."""
    found: set[str] = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= (
                    {node.attr} if isinstance(node.value, ast.Name) and node.value.id in ("self", "made") else set()
                )
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if node.value.startswith(("_fsdp", "_runs", "_own")) else set()
    return found


def of_torch(source: str, own: set[str]) -> Iterator[str]:
    """Private names in a source that are not the engine's own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from filter(is_private, [*(node.module or "").split("."), *(each.name for each in node.names)])
        elif isinstance(node, ast.Import):
            yield from (part for each in node.names for part in each.name.split(".")[1:] if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | PYTHONS:
            yield node.attr


def test_other_files_have_none() -> None:
    own = own_names()
    found = {str(path.relative_to(ROOT)): [*of_torch(path.read_text(encoding="utf-8"), own)] for path in FILES}
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize("line", ["from torch._C import x", "import torch._dynamo", "y = z._version", "torch._C.f()"])
def test_one_that_is_added_is_found(line: str) -> None:
    assert [*of_torch(line, own_names())]


def classes() -> Iterator[type]:
    for path in FILES:
        module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
        yield from (
            each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__
        )


def test_private_methods_that_are_overridden_are_declared_and_there_are_few() -> None:
    found = {
        name
        for kind in classes()
        for base in inspect.getmro(kind)[1:]
        if base.__module__.startswith("torch")
        for name in vars(kind).keys() & vars(base).keys()
        if is_private(name) and name not in ("_abc_impl", "_backward_cls")
    }
    assert found <= {*OVERRIDDEN}
    assert len({*filter(is_private, NAMES), *OVERRIDDEN}) <= MOST


HIDE = """
import json, os, sys
import torch, torch.distributed.checkpoint, torch.distributed.fsdp
from importlib import import_module
before, everything, modules, names = set(sys.modules), *map(json.loads, sys.argv[1:])
for each in everything:
    try:
        import_module(each)
    except ImportError:
        pass

class Gone:
    def __get__(self, *_):
        raise AttributeError("hidden")

def hide(path, of, name):
    owner = import_module(path)
    for each in filter(None, of.split(".")):
        owner = getattr(owner, each)
    try:
        delattr(owner, name)
    except (AttributeError, TypeError):
        if of:
            setattr(owner, name, Gone())

for path, of, name in names:
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            hide(path, of, name)
            for each in modules:
                import_module(each)
            print("fine", name, flush=True)
        finally:
            os._exit(0)
    os.wait()
"""


def test_importing_needs_none_of_them() -> None:
    """Each is deleted in a process of its own before the engine is imported."""
    modules = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES)
    for each in modules:
        import_module(each)
    everything = [each for each in sys.modules if each.split(".")[0] == "torch"]
    hidden = {
        name: (owner, "", name) if isinstance(owner, str) else (owner.__module__, owner.__qualname__, name)
        for name, owner in NAMES.items()
        if not isinstance(owner, str) or owner.startswith("torch")
    }
    told = subprocess.run(
        [sys.executable, "-c", HIDE, json.dumps(everything), json.dumps(modules), json.dumps([*hidden.values()])],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert {line.split()[1] for line in told.stdout.splitlines()} == hidden.keys(), told.stderr[-3000:]


def test_one_that_is_gone_is_told_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    raising = private_torch._of(nn.Module, "_no_such_name")
    monkeypatch.delitem(NAMES, "_no_such_name")
    with pytest.raises(MissingName, match=f"torch {torch.__version__}.*has no _no_such_name".replace("+", r"\+")):
        raising(1)
    for use in (private_torch.parameters_of, private_torch.schema_of):
        with pytest.raises(MissingName, match="has no _"):
            use(SimpleNamespace())


# -- each does what the engine takes it for ----------------------------------------------------------------------------


def test_tensors_storages_and_slots() -> None:
    x = torch.ones(4)
    before = private_torch.version_of(x)
    x.add_(1)
    assert private_torch.version_of(x) == before + 1
    place = StorageWeakRef(x.untyped_storage()).cdata
    count, view = private_torch.references_to(place), x[2:]
    assert private_torch.references_to(place) == count + 1
    param = nn.Parameter(view)
    linear = nn.Linear(2, 2)
    private_torch.parameters_of(linear)["bias"] = param
    assert linear.bias is param, "parameters of a module are its slots"


def test_subclasses_are_plain_tensors() -> None:
    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise AssertionError

    with private_torch.without_torch_function():
        assert float(torch.ones(1).as_subclass(Loud) + 1) == 2


def test_a_backward_tells_what_runs() -> None:
    told: list[Any] = []
    w, v = (torch.ones(1, requires_grad=True) for _ in range(2))
    loss = w * 2
    leaves = [each.view_as(each).grad_fn.next_functions[0][0] for each in (w, v)]

    def hook(_: Any) -> None:
        told.extend(private_torch.will_run(each) for each in leaves if each is not None)
        told.append(private_torch.running_node())
        private_torch.at_end_of_backward(lambda: told.append("over"))

    loss.register_hook(hook)
    loss.backward()
    assert told[:2] == [True, False]
    assert told[2] is loss.grad_fn
    assert told[3:] == ["over"]
    assert private_torch.running_node() is None


def test_schemas_tell_what_is_written_and_foreach_takes_the_classes_that_are_listed() -> None:
    add = torch.ops.aten.add
    assert [private_torch.schema_of(each.Tensor).is_mutable for each in (torch.ops.aten.add_, add)] == [True, False]
    assert all(DTensor in types for types in private_torch.foreach_types)


def test_pytrees_are_flattened() -> None:
    tree = {"a": [1, 2], "b": (3,)}
    leaves, shape = private_torch.tree_flatten(tree)
    assert leaves == private_torch.tree_leaves(tree) == [1, 2, 3]
    assert private_torch.tree_unflatten([2, 3, 4], shape) == private_torch.tree_map(lambda x: x + 1, tree)
    assert private_torch.tree_map_only(int, str, [1, "a"]) == ["1", "a"]


def test_groups_tell_their_backends(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        cpu = torch.device("cpu")
        backend = private_torch.backend_of(group, cpu)
        assert private_torch.backends_of(group, cpu)[0].name() == backend.name() == "gloo"
        assert private_torch.timeout_of(backend) == timedelta(minutes=30)
        assert private_torch.timeout_of(object()) == default_pg_timeout
        short = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=5)))
        assert private_torch.timeout_of(backend, short, object()) == timedelta(seconds=5)
        made: Any = dist.ProcessGroup(0, 1)  # type: ignore[call-arg] # torch's stubs know the one with a store
        private_torch.register_backend(made, cpu, dist.ProcessGroup.BackendType.GLOO, backend)
        private_torch.set_default_backend(made, dist.ProcessGroup.BackendType.GLOO)
        made.allreduce([torch.ones(1)]).wait()
        assert isinstance(private_torch.flight_recorder("fr")(), bytes)
        mesh = DeviceMesh("cpu", torch.zeros(1, 1, dtype=torch.int64), mesh_dim_names=("a", "b"))
        held = DTensor.from_local(torch.ones(2), mesh, run_check=False)
        assert private_torch.spec_of(held).placements == held.placements
        private_torch.put_local_tensor(held, torch.zeros(2))
        assert not bool(private_torch.local_tensor(held).any())
    finally:
        dist.destroy_process_group()
