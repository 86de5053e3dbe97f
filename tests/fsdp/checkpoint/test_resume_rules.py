"""Which changes a resumed run may have, and which make it another run."""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase
from typing import Any

import pytest

from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.fsdp.checkpoint.resume import FREE_KEYS, NOTED_KEYS, POSITION_NOTE, check_resumable
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.cards import dataset_cards

BEFORE: dict[str, Any] = {
    "config": {
        "training": {"lr": 1e-4, "save": "runs/a", "optimizer": "adamw", "train_iters": 10},
        "model": {"model_id": "qwen3_vl", "freeze": ["model.visual"]},
        "parallel": {"fully_shard_parallel_size": 2, "fsdp_plan": {"param_dtype": "bf16"}},
    },
    "dataset": {"files": {"a.jsonl": 100}, "rows": 7},
    "global_batch": 8,
    "world_size": 2,
    "versions": {"torch": "2.13.0"},
}


def changed(**dotted: Any) -> dict[str, Any]:
    """`BEFORE` with other values: `config__training__lr=2e-4`."""
    after = copy.deepcopy(BEFORE)
    for key, value in dotted.items():
        *path, last = key.split("__")
        target = after
        for part in path:
            target = target[part]
        target[last] = value
    return after


def test_same_run() -> None:
    assert check_resumable(BEFORE, changed()) == []


def test_data_of_a_function_and_of_the_configuration() -> None:
    """One line, whatever else differs."""
    by_function = changed(batching={"loader": "provided"}, dataset={"class": "mine"})
    by_yaml = changed(batching={"micro_batches_per_step": 2}, config__training__lr=7.0)
    for then, today, which in ((by_function, by_yaml, "the run that saved"), (by_yaml, by_function, "this run")):
        with pytest.raises(CheckpointError) as raised:
            check_resumable(then, today)
        assert str(raised.value).startswith(f"{which}") and len(raised.value.problems) == 1
        assert "reads its data by a function of the caller" in str(raised.value)
    assert check_resumable(by_function, changed(batching={"loader": "provided"}, dataset={"class": "mine"})) == []


@pytest.mark.parametrize(
    "change",
    [
        {"config__training__save": "elsewhere"},
        {"config__training__log_interval": 5},
        {"config__tools": {"profile": {"enable": True}}},
        {"config__parallel__fully_shard_parallel_size": 1},
        {"config__features": {"recompute": True}},
        {"config__training__sampling": {"prompts": ["a seven"], "interval": 5}},
        {"config__data": {"dataset_param": {"basic_parameters": {"features_dir": "elsewhere"}}}},
    ],
    ids=str,
)
def test_free(change: dict[str, Any]) -> None:
    assert check_resumable(BEFORE, changed(**change)) == []


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"config__training__lr": 2e-4}, "training.lr  was 0.0001, is 0.0002"),
        ({"config__training__train_iters": 20}, "training.train_iters  was 10, is 20"),
        ({"config__training__ema": {"enable": True}}, "training.ema.enable  was null, is true"),
        ({"config__parallel__fsdp_plan": {"param_dtype": "fp32"}}, 'fsdp_plan.param_dtype  was "bf16", is "fp32"'),
        ({"versions": {"torch": "2.14.0"}}, 'torch was "2.13.0", is "2.14.0"'),
        ({"world_size": 1}, "world size was 2, is 1"),
    ],
    ids=str,
)
def test_noted(change: dict[str, Any], note: str) -> None:
    (said,) = check_resumable(BEFORE, changed(**change))
    assert note in said


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"config__model__freeze": []}, r'model\.freeze +was \["model\.visual"\], is \[\]'),
        ({"config__training__optimizer": "muon"}, r'training\.optimizer +was "adamw", is "muon"'),
        ({"config__training__diffusion": {"shift": 3.0}}, r"training\.diffusion\.shift +was null, is 3\.0"),
        ({"config__training__seed": 1}, r"training\.seed +was null, is 1"),
        ({"global_batch": 16}, r"was 8, is 16\. Choose gradient_accumulation_steps .* is 8\."),
        ({"config__data": {"dataset_param": {"attr": {"images": "x"}}}}, r"attr\.images +was null, .*--accept-data-ch"),
        ({"dataset__rows": 8}, r"data: rows +was 7, is 8\..*--accept-data-change"),
        ({"dataset__files": {"b.jsonl": 100}}, r"data: files\.a\.jsonl +was 100, is null"),
    ],
    ids=str,
)
def test_refused(change: dict[str, Any], refusal: str) -> None:
    with pytest.raises(CheckpointError, match=refusal) as caught:
        check_resumable(BEFORE, changed(**change))
    assert "--weights-only" in str(caught.value)


def test_all_refusals_at_once_and_data_may_be_accepted() -> None:
    now = changed(config__model__model_id="x", dataset__rows=8, global_batch=1)
    with pytest.raises(CheckpointError) as caught:
        check_resumable(BEFORE, now)
    assert len(caught.value.problems) == 3
    assert check_resumable(BEFORE, changed(dataset__rows=8), accept_data_change=True) == [
        "data: rows  was 7, is 8",
        POSITION_NOTE,
    ]


def test_keys_that_a_newer_version_brings_are_noted() -> None:
    now = changed(config__model__new_key=0, config__model__freeze=[], versions={"mindspeed-mm": "9"})
    with pytest.raises(CheckpointError) as caught:
        check_resumable(BEFORE, now)
    assert [problem.key for problem in caught.value.problems] == ["model.freeze"]


def test_types_that_json_lacks_are_no_change() -> None:
    assert check_resumable(BEFORE, changed(config__model__freeze=("model.visual",))) == []


def test_checkpoint_that_tells_nothing_refuses_a_configuration() -> None:
    assert check_resumable({}, {}) == []


def test_every_rule_names_keys_that_exist() -> None:
    """A rule for a key that was renamed would silently refuse it."""
    keys = leaves(Arguments().model_dump(mode="json"))
    keys += [f"data.dataset_param.{key}" for card in dataset_cards().values() for key in card]
    for pattern in (*FREE_KEYS, *NOTED_KEYS):
        assert any(fnmatchcase(key, pattern) for key in keys), pattern


def leaves(value: Any, prefix: str = "") -> list[str]:
    if not isinstance(value, dict) or not value:
        return [prefix]
    return [leaf for key, item in value.items() for leaf in leaves(item, f"{prefix}.{key}" if prefix else key)]


def test_other_micro_batches_of_samples_of_different_sizes_are_refused() -> None:
    of_sizes = {"micro_batches_per_step": 2, "micro_batch_size": 4, "max_tokens_per_batch": None, "shuffle": True}
    before = changed() | {"batching": of_sizes}
    assert check_resumable(before, before) == []
    for change in ({"micro_batch_size": 2}, {"max_tokens_per_batch": 64}, {"shuffle": False}):
        with pytest.raises(CheckpointError, match=r"micro-batches +was .*micro_batch_size 4"):
            check_resumable(before, before | {"batching": of_sizes | change})
    language = changed() | {"batching": {}}
    with pytest.raises(CheckpointError, match=r'was "samples as they come", is "kind packed'):
        check_resumable(language, language | {"batching": {"kind": "packed", "tokens": 64}})
    assert check_resumable(language, language) == []


@pytest.mark.edge("G10")
def test_another_split_of_a_batch_of_samples_of_different_sizes_is_noted() -> None:
    """The loader knows whether the place in the epoch can be kept."""
    of_sizes = {"micro_batches_per_step": 2, "micro_batch_size": 4, "max_tokens_per_batch": None, "shuffle": True}
    before = changed() | {"batching": of_sizes}
    (said,) = check_resumable(
        before, before | {"batching": of_sizes | {"micro_batches_per_step": 4, "micro_batch_size": 2}}
    )
    assert said.startswith("micro-batches  was ")
    of_tokens = changed() | {"batching": of_sizes | {"max_tokens_per_batch": 64}}
    now = of_tokens | {"batching": of_tokens["batching"] | {"micro_batch_size": 1}}
    assert len(check_resumable(of_tokens, now)) == 1
    with pytest.raises(CheckpointError, match="micro-batches"):
        check_resumable(of_tokens, now | {"batching": now["batching"] | {"micro_batches_per_step": 4}})


@pytest.mark.edge("N7")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shuffle", False),
        ("sampler_type", "SequentialSampler"),
        ("drop_last", False),
        ("dataloader_mode", "base"),
        ("shuffle_window", 5),
    ],
)
def test_another_order_of_the_data_is_refused_or_accepted_with_what_the_position_means(key: str, value: Any) -> None:
    loader = {"shuffle": True, "sampler_type": "x", "drop_last": True, "dataloader_mode": "sampler", "num_workers": 2}
    before = changed(config__data={"dataloader_param": loader | {"shuffle_window": 9}})
    now = changed(config__data={"dataloader_param": loader | {"shuffle_window": 9, key: value, "num_workers": 0}})
    with pytest.raises(CheckpointError, match=rf"dataloader_param\.{key} .*--accept-data-change") as caught:
        check_resumable(before, now)
    assert len(caught.value.problems) == 1
    noted = check_resumable(before, now, accept_data_change=True)
    assert key in noted[0] and noted[1:] == [POSITION_NOTE]


@pytest.mark.edge("R3")
def test_features_that_only_say_how_it_is_computed_are_free() -> None:
    """Of the section, the loss and quantised products are what makes it another run."""
    before = {"config": Arguments().model_dump(mode="json")}
    features = leaves(before["config"]["features"], "features")
    changed_keys = []
    for key in features:
        now = copy.deepcopy(before)
        *path, last = key.split(".")
        place: Any = now["config"]
        for part in path:
            place = place[part]
        place[last] = "another value"
        try:
            if check_resumable(before, now):
                changed_keys.append(key)
        except CheckpointError:
            changed_keys.append(key)
    loss = ["loss_type", "picture_loss_weight", "router_aux_loss_coef", "text_loss_weight", "z_loss_coef"]
    assert sorted(changed_keys) == [f"features.loss_cfg.{key}" for key in loss]


@pytest.mark.edge("U2")
def test_a_change_of_the_data_is_told_once_and_in_words() -> None:
    def context(shrinks: bool, rows: int, *names: str) -> dict[str, Any]:
        files = [{"name": name, "bytes": 10 * rows, "rows": rows, "sha256": f"{name}{rows}" * 20} for name in names]
        settings = {"basic_parameters": {"truncation": "shrink" if shrinks else "drop"}, "template": str(shrinks)}
        basic = settings["basic_parameters"] | {"chat_template": f"{shrinks}.jinja"}
        dataset = {"rows": rows * len(names), "files": files, "settings": settings, "hash": f"{shrinks}{rows}{names}"}
        return {"config": {"data": {"dataset_param": {"basic_parameters": basic}}}, "dataset": dataset}

    def refusals(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str]]:
        with pytest.raises(CheckpointError) as caught:
            check_resumable(before, now)
        return [(problem.key, problem.what) for problem in caught.value.problems]

    basic = "data.dataset_param.basic_parameters"
    assert refusals(context(True, 3, "a.jsonl"), context(False, 3, "a.jsonl")) == [
        (f"{basic}.chat_template", 'was "True.jinja", is "False.jinja"'),
        (f"{basic}.truncation", 'was "shrink", is "drop"'),
    ]
    assert refusals(context(True, 3, "a.jsonl", "b.jsonl"), context(True, 4, "a.jsonl", "c.jsonl")) == [
        ("data: a.jsonl", "had 3 rows, has 4"),
        ("data: b.jsonl", "is no longer named; the checkpoint was trained on it"),
        ("data: c.jsonl", "is named now, and was not when the checkpoint was written"),
    ]
    turned = refusals(context(True, 3, "a.jsonl", "b.jsonl"), context(True, 3, "b.jsonl", "a.jsonl"))
    assert turned == [("data: files", "the files come in another order")]
    edited = context(True, 3, "a.jsonl")
    edited["dataset"]["files"][0]["sha256"] = "0"
    edited["dataset"]["hash"] = "0"
    assert refusals(context(True, 3, "a.jsonl"), edited) == [("data: a.jsonl", "its content has changed")]
    assert refusals({"dataset": {"hash": "a"}}, {"dataset": {"hash": "b"}}) == [("data: hash", 'was "a", is "b"')]
