"""A run's identity: what changes it, what does not, and what a name may hold."""

from __future__ import annotations

import copy

import pytest
import yaml
from omegaconf import OmegaConf

from harness.config.compose import compose
from harness.config.schema import Config
from harness.store import identity
from harness.store.rundir import flatten
from tests.support.mutants import finds


@pytest.fixture
def config():
    return OmegaConf.to_container(OmegaConf.structured(Config), enum_to_str=True)


def test_canonical_form_is_pinned():
    """Changing it makes every run on every disk a stranger."""
    plain = {"train": {"lr": 1e-05, "steps": 3}, "a": [1, 2.0, None, True], "notes": "no", "cluster": {}}
    assert identity.canonical(plain) == '{"a":[1,2.0,null,true],"train":{"lr":1e-05,"steps":3}}'
    assert identity.signature(plain).startswith("965c01ef9853")
    assert identity.signature(dict(reversed(plain.items()))) == identity.signature(plain)
    assert identity.signature({"lr": 0.1 + 0.2}) != identity.signature({"lr": 0.3}), "floats that differ in a bit"
    with pytest.raises(ValueError, match="not JSON compliant"):
        identity.canonical({"lr": float("nan")})


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("cluster", "partition", "big"),
        ("cluster", "threads_per_rank", 7),
        ("launch", "root", "/elsewhere"),
        ("wandb", "mode", "offline"),
        ("study", "question", "why?"),
        ("run", "name", "mine"),
    ],
)
def test_where_and_why_a_cell_runs_is_no_part_of_it(config, group, key, value):
    before = identity.signature(config)
    assert config[group][key] != value
    config[group][key] = value
    config["notes"] = "second try"
    assert identity.signature(config) == before


def test_runs_keep_their_identity_when_settings_are_added(config):
    assert '"fp8' not in identity.canonical(config)
    before = copy.deepcopy(config)
    config["dtype"]["fp8"] = "current"
    assert '"fp8":"current"' in identity.canonical(config)
    del before["dtype"]["fp8"]
    assert identity.signature(before) != identity.signature(config)
    config["dtype"]["fp8"] = None
    assert identity.signature(before) == identity.signature(config)


def test_runs_keep_their_identity_when_settings_are_removed(config):
    """Stored runs have them still; one that was made with another value is another run, and no request of today's."""
    for group, key, usual in ((group, *pair) for group, gone in identity.REMOVED.items() for pair in gone.items()):
        stored = config | {group: config[group] | {key: usual}}
        assert identity.signature(stored) == identity.signature(config)
        assert identity.current(stored) == config
    odd = config | {"engine": config["engine"] | {"unit_min_elements": 5}}
    assert identity.signature(odd) != identity.signature(config)
    assert identity.current(odd) == odd


def test_every_other_leaf_is_part_of_it(config):
    before = identity.signature(config)
    for group in (key for key in config if key not in identity.EXCLUDED):
        for key, value in config[group].items():
            changed = copy.deepcopy(config)
            changed[group][key] = "changed" if value != "changed" else "other"
            assert identity.signature(changed) != before, f"{group}.{key}"


def test_name_says_what_the_cell_is(config):
    config["train"]["global_batch_size"], config["train"]["microbatch_size"] = 24, 4
    config["mesh"]["world_size"] = 3
    assert identity.run_name(config) == "tiny-native-optim_grads_params-fp32-dp3-k2"
    config["mesh"] |= {"world_size": 6, "dp_outer": 2}
    assert identity.run_name(config) == "tiny-native-optim_grads_params-fp32-hsdp3x2-k1"
    config["sharding"]["outer"] = "optim"
    assert identity.run_name(config) == "tiny-native-optim_grads_params-fp32-hfsdp3x2-k1"
    for text in ("../up", "a/b", "q\"u'o", "new\nline", "%j", "$(x)", ".hidden", "Ünïcode", "-rf"):
        made = identity.slug(text)
        assert set(made) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.-")
        assert not made.startswith((".", "-"))


UNUSUAL = {
    "data.kind=text": "text",
    "data.kind=ext data.target=my_data:Words": "my_data.words",
    "optimizer.name=sgd": "sgd",
    "optimizer.name=ext optimizer.target=my_optimizer:Lion": "my_optimizer.lion",
    "optimizer.lr=1e-5": "lr0.00001",
    "optimizer.lr=100.0": "lr100",
    "train.steps=1000": "steps1000",
    "train.replicate=1": "r1",
    "measure.callbacks=[my_callbacks:Sparsity,b:Second]": "sparsity-second",
    "run.name=my_run.1": None,
}


def named(config, words):
    for word in words.split():
        path, _, value = word.partition("=")
        group, _, key = path.partition(".")
        config[group][key] = yaml.safe_load(value) if "e-" not in value else float(value)
    return identity.run_name(config)


@pytest.mark.parametrize("words", UNUSUAL)
def test_name_says_what_is_not_as_usual(config, words):
    usual = identity.run_name(config)
    expected = "my_run.1" if UNUSUAL[words] is None else f"{usual}-{UNUSUAL[words]}"
    assert named(config, words) == expected


def test_what_is_usual_is_the_default():
    config = flatten(compose().config)
    assert not [key for key, usual, _ in identity.UNUSUAL if config[key] not in usual]


test_a_mutant_is_found = finds(
    "names of runs",
    test_name_says_what_is_not_as_usual="""
        rates are left out: In names of runs rates are left out
            store.identity.UNUSUAL: [row for row in was if row[2] != "lr{}"]
            (words="optimizer.lr=1e-5")
        callbacks are left out: In names of runs callbacks are left out
            store.identity.UNUSUAL: [row for row in was if "call" not in row[0]]
            (words="measure.callbacks=[my_callbacks:Sparsity,b:Second]")
        a class of one's own is ext: In names of runs a class of one's own is ext
            store.identity._of_ones_own: group.get("target") or =>
            (words="data.kind=ext data.target=my_data:Words")
        run.name is ignored: In names of runs run.name is ignored
            store.identity.run_name: get("name") => get("names")
            (words="run.name=my_run.1")
    """,
)
