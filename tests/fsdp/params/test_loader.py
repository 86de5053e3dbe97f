"""From file and overrides to a configuration: priority, renames, plugin keys, origins, paths, problems."""

from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.fsdp.params.loader import (
    PluginKeys,
    ResolvedConfig,
    dump_resolved,
    load_config,
    read_plugins,
    resolved_dict,
)


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load_text(text: str, *overrides: str, plugin_keys: PluginKeys | None = None) -> ResolvedConfig:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load_config(path, overrides, plugin_keys=plugin_keys)

    return load_text


def problems(load: Any, text: str, *overrides: str, **options: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides, **options)
    return list(caught.value.problems)


# --- priority ---


def test_command_line_over_file_over_default(load: Any) -> None:
    config = load("training: {lr: 1e-5, seed: 7}\n", "training.lr=2e-5", "model.freeze=[model.visual]")
    assert config.arguments.training.lr == 2e-5
    assert config.arguments.training.seed == 7
    assert config.arguments.training.clip_grad == 1.0
    assert config.arguments.model.freeze == ("model.visual",)
    kinds = {key: config.origins[key].kind for key in ("training.lr", "training.seed", "training.clip_grad")}
    assert kinds == {"training.lr": "command line", "training.seed": "yaml", "training.clip_grad": "default"}
    assert config.origins["training.seed"].where.endswith("run.yaml:1:28")


def test_an_override_is_not_there_when_the_file_is_read_again(tmp_path: Path) -> None:
    """The text is parsed once, and each reading has a tree of its own."""
    path = tmp_path / "run.yaml"
    path.write_text("training: {lr: 1e-3, adam_beta1: 0.8}\n")
    changed, again = (load_config(path, words).arguments.training for words in (["training.lr=2e-3"], []))
    assert (changed.lr, again.lr, changed.adam_beta1, again.adam_beta1) == (2e-3, 1e-3, 0.8, 0.8)
    path.write_text("training: {lr: 1e-4}\n")
    assert load_config(path).arguments.training.lr == 1e-4


def test_a_nested_override_touches_that_key_only(load: Any) -> None:
    text = "training: {lora: {enable: false, rank: 4, alpha: 32}}\n"
    assert load(text, "training.lora.rank=2").arguments.training.lora.alpha == 32
    lora = load(text, "training.lora={enable: true}").arguments.training.lora
    assert (lora.enable, lora.rank, lora.alpha) == (True, 4, 32)


def test_an_override_reaches_sections_that_are_null_or_missing(load: Any) -> None:
    for text in ("training:\n", "model: {}\n"):
        lora = load(text, "training.lora.enable=true", "training.lora.rank=2").arguments.training.lora
        assert (lora.enable, lora.rank) == (True, 2)


def test_an_override_does_not_leak_through_an_alias(load: Any) -> None:
    text = "data:\n  dataset_param: &d {basic_parameters: {cutoff_len: 5}}\n  val_dataset_param: *d\n"
    data = load(text, "data.dataset_param.basic_parameters.cutoff_len=9").arguments.data
    assert data.dataset_param.basic_parameters.cutoff_len == 9
    assert data.val_dataset_param.basic_parameters.cutoff_len == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.lrr=1", "Did you mean 'lr'"),
        ("training.lr=abc", "'abc' is not a number"),
        ("training.lr", "is not section.key=value"),
        ("--training.lr=1", "take no dashes"),
        ("training.seed.x=1", "has no keys below it"),
        ("model.freeze=[a", "not valid YAML"),
        ("=1", "is not section.key=value"),
    ],
)
def test_a_wrong_override_is_named(load: Any, override: str, message: str) -> None:
    (problem,) = problems(load, "training: {seed: 1}\n", override)
    assert message in str(problem)
    assert problem.where == "command line"


# --- values ---


def test_null_is_taken_where_a_key_is_optional(load: Any) -> None:
    text = (
        "training: {save: null, train_epochs: null, plugin: null, lr_scaling_plan: ~, lora: }\n"
        "features:\ndata:\n  dataset_param:\n    attr: {observation_tag: null}\n    preprocess_parameters:\n"
    )
    arguments = load(text).arguments
    assert arguments.training.plugin == ()
    assert arguments.data.dataset_param.attr.observation_tag is None
    assert "null" in problems(load, "training: {lr: null}\n")[0].what


@pytest.mark.parametrize("word", ["yes", "on", "true", "True", "YES"])
def test_older_words_for_true(load: Any, word: str) -> None:
    assert load(f"training: {{use_deter_comp: {word}}}\n").arguments.training.use_deter_comp is True


def test_a_list_of_names_may_be_one_name(load: Any) -> None:
    assert load("model: {freeze: model.visual}\n").arguments.model.freeze == ("model.visual",)


def test_all_problems_at_once_in_the_order_of_the_file(load: Any) -> None:
    text = "training:\n  lr: fast\n  learning_rate: 1\nparallel:\n  fsdp_plan: {param_dtype: bf61}\n"
    found = problems(load, text, "tools.profil.enable=true")
    assert [(p.where.rpartition("run.yaml:")[2], p.key) for p in found] == [
        ("2:7", "training.lr"),
        ("3:3", "training.learning_rate"),
        ("5:28", "parallel.fsdp_plan.param_dtype"),
        ("command line", "tools.profil"),
    ]
    assert found[1].way_out == "Did you mean 'lr'?"
    assert found[2].way_out == "Did you mean 'bf16'?"


def test_the_headline_counts(load: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load("training: {lr: fast}\n")
    first, second = str(caught.value).splitlines()
    assert first.endswith("run.yaml: 1 problem")
    assert second.split("  ")[1:] == [second.split("  ")[1], "training.lr", "'fast' is not a number"]


# --- other names ---


def test_aliases(load: Any) -> None:
    arguments = load(
        "tools: {profiler: {enable: no, level: level2, start_step: 3}, memory_profile: {record_peak_memory: true}}\n"
        "data: {dataloader_param: {collate_param: {collator_id: qwen3vl}}}\n"
        "ep_dispatcher: mc2\n"
        "parallel: {recompute: true, recompute_plan: {apply_modules: [a]}}\n"
        "features: {loss_cfg: {loss_type: custom}}\n"
    ).arguments
    assert (arguments.tools.profile.static_param.level, arguments.tools.profile.static_param.start_step) == (2, 3)
    assert arguments.tools.memory_profile.mem_info is True
    assert arguments.data.dataloader_param.collate_param.model_name == "qwen3vl"
    assert arguments.parallel.ep_plan.dispatcher == "mc2"
    assert arguments.features.recompute is True
    assert arguments.features.recompute_plan.apply_modules == ("a",)
    assert arguments.features.loss_cfg.loss_type == "raw"


def test_an_override_may_use_an_alias(load: Any) -> None:
    config = load("tools: {profiler: {level: 0}}\n", "tools.profile.level=2")
    assert config.arguments.tools.profile.static_param.level == 2


def test_two_names_that_disagree_are_an_error_and_two_that_agree_are_not(load: Any) -> None:
    text = "parallel: {recompute: true}\nfeatures: {recompute: false}\n"
    (problem,) = problems(load, text)
    assert problem.key == "parallel.recompute"
    assert "features.recompute is false" in problem.what
    assert load(text.replace("false", "true")).arguments.features.recompute is True
    assert load(text.replace("recompute: true", "recompute: null")).arguments.features.recompute is False


def test_misplaced_keys_are_honoured_with_a_warning_each(load: Any) -> None:
    config = load("model: {loss_cfg: {loss_type: raw}, recompute: true}\n")
    assert config.arguments.features.loss_cfg.loss_type == "raw"
    assert config.arguments.features.recompute is True
    assert len(config.warnings) == 2
    assert not hasattr(config.arguments.model, "loss_cfg")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {enable_gradient_checkpointing: yes}\n", True),
        ("model: {enable_gradient_checkpointing: true}\nfeatures: {recompute: false}\n", True),
        ("model: {enable_gradient_checkpointing: true, recompute: false}\n", True),
        ("model: {enable_gradient_checkpointing: false}\nparallel: {recompute: true}\n", True),
        ("model: {enable_gradient_checkpointing: false}\n", False),
        ("model: {enable_gradient_checkpointing: null}\n", False),
    ],
)
def test_either_switch_of_older_files_switches_recompute_on(load: Any, text: str, expected: bool) -> None:
    arguments = load(text).arguments
    assert arguments.features.recompute is expected
    assert not hasattr(arguments.model, "enable_gradient_checkpointing")
    assert load(text, "features.recompute=false").arguments.features.recompute is False
    assert load(text, "model.enable_gradient_checkpointing=false").arguments.features.recompute is False


def test_recompute_switch_of_older_files_is_warned_of_and_checked(load: Any) -> None:
    (warning,) = load("model: {enable_gradient_checkpointing: true}\n").warnings
    assert "model.enable_gradient_checkpointing  is read as features.recompute" in warning
    (problem,) = problems(load, "model: {enable_gradient_checkpointing: maybe}\n")
    assert (problem.key, problem.where.rpartition("/")[2]) == ("features.recompute", "run.yaml:1:40")


def test_meaningless_keys_are_dropped_with_one_warning_that_gives_the_reason(load: Any) -> None:
    config = load("training: {profile: {enable: true, ranks: [0]}, save_steps: 5}\nparallel: {pregather: true}\n")
    assert len(config.warnings) == 3
    assert any("training.save_interval counts" in warning for warning in config.warnings)
    assert config.arguments.parallel.fsdp_plan.pregather is False


# --- unknown keys ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {learning_rat: 1}\n", "Did you mean 'lr'?"),
        ("parallel: {tensor_parallel_sise: 1}\n", "Did you mean 'tensor_parallel_size'?"),
        ("model: {lr: 1}\n", "training.lr"),
        ("training: {param_dtype: bf16}\n", "parallel.fsdp_plan.param_dtype"),
        ("trainimg: {lr: 1}\n", "Did you mean 'training'?"),
        ("training: {lora: {r: 1}}\n", "Did you mean 'rank'?"),
        ("training: {lr_scaling_plan: [{match: a, scal: 1}]}\n", "Did you mean 'scale'?"),
        ("training: {lr_scaling_plan: [{match: a, scale:0.1}]}\n", "a space after the colon: 'scale: 0.1'."),
        ("features: {zzzzz: 1}\n", "Keys here: recompute"),
        ("training: {weight_decay: 0,1}\n", "YAML writes decimals with a point"),
    ],
)
def test_unknown_keys_say_what_was_probably_meant(load: Any, text: str, message: str) -> None:
    (problem,) = problems(load, text)
    assert problem.what == "unknown key"
    assert message in problem.way_out


def test_every_unknown_key_of_the_command_line_is_told(load: Any) -> None:
    found = problems(load, "{}\n", "training.emma=1", "training.lora.rnk=3", "model.trainable=1")
    assert {problem.key for problem in found} == {"training.emma", "training.lora.rnk", "model.trainable"}


def test_a_top_level_holder_of_anchors_is_no_unknown_section(load: Any) -> None:
    assert load("shared: {rate: &r 1e-5}\ntraining: {lr: *r}\n").arguments.training.lr == 1e-5
    assert problems(load, "shared: {rate: 1e-5}\n")[0].key == "shared"


# --- plugins ---

TOY = """
training: {plugin: [toy]}
model: {model_id: toy, width: 8}
data: {dataset_param: {dataset_type: toys, rows: 3}}
"""


def test_an_outside_plugins_keys_are_unchecked_while_it_is_not_imported(load: Any) -> None:
    config = load(TOY)
    assert config.unchecked == ("model.width", "data.dataset_param.rows")
    assert config.arguments.model.width == 8


def test_declared_keys_are_checked_and_filled(load: Any) -> None:
    keys = PluginKeys(
        model={"width": 4, "depth": 2, "rates": [0.1], "tied": False, "scale": 1.0},
        dataset={"rows": 1, "basic_parameters.noise": 0.5},
    )
    config = load(TOY, "model.tied=yes", "model.scale=2", plugin_keys=keys)
    assert config.arguments.model.tied is True
    assert isinstance(config.arguments.model.scale, float)
    assert (config.arguments.model.width, config.arguments.model.depth) == (8, 2)
    assert config.arguments.model.rates == [0.1]
    assert config.arguments.data.dataset_param.rows == 3
    assert config.arguments.data.dataset_param.basic_parameters.noise == 0.5
    assert config.origins["model.depth"].kind == "card"
    assert config.unchecked == ()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.width=wide", "'wide' is not a whole number"),
        ("model.widtt=1", "Did you mean 'width'"),
        ("data.dataset_param.rows=true", "true is not a whole number"),
        ("data.dataset_param.basic_parameters.rows=1", "unknown key"),
    ],
)
def test_a_wrong_value_of_a_declared_key(load: Any, override: str, message: str) -> None:
    (problem,) = problems(load, TOY, override, plugin_keys=PluginKeys({"width": 4}, {"rows": 1}))
    assert message in str(problem)


def test_ids_that_nothing_brings_are_errors(load: Any) -> None:
    (problem,) = problems(load, "model: {model_id: qwen3_vll}\n")
    assert "Did you mean 'qwen3_vl'" in problem.way_out
    assert load("model: {model_id: mine}\ntraining: {plugin: a/b}\n").arguments.model.model_id == "mine"


def test_plugins_are_read_before_anything_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("training: {plugin: [a/b], lr: wrong}\nmodel: {model_id: m}\nnonsense: 1\n")
    assert read_plugins(path) == (["a/b"], "m", None)
    assert read_plugins(path, ["training.plugin=c.d", "data.dataset_param.dataset_type=t"]) == (["c.d"], "m", "t")


# --- paths and derived values ---


def test_the_processor_comes_from_the_models_folder_unless_it_is_named(load: Any) -> None:
    config = load("model: {model_name_or_path: m}\n")
    key = "data.dataset_param.preprocess_parameters.model_name_or_path"
    assert config.arguments.data.dataset_param.preprocess_parameters.model_name_or_path == "m"
    assert str(config.origins[key]) == "derived: model.model_name_or_path"
    assert config.arguments.data.val_dataset_param is None
    named = load("model: {model_name_or_path: m}\n", f"{key}=p")
    assert named.arguments.data.dataset_param.preprocess_parameters.model_name_or_path == "p"


# --- writing out ---


def test_written_out_with_origins_it_reads_back_the_same(load: Any, tmp_path: Path) -> None:
    config = load(
        "training: {lr: 1e-5, save: 'yes: \"#\" {x}', lr_scaling_plan: [{match: '^a.{2}$', scale: 0.1}]}\n"
        "model: {transformer: {a: [1, {b: null}], 'c d': 'true'}, freeze: ['a.{*}', 'null']}\n",
        "training.seed=3",
    )
    text = dump_resolved(config)
    assert "  seed: 3" in text
    assert "# command line" in text
    copy = tmp_path / "resolved.yaml"
    copy.write_text(text)
    again = load_config(copy)
    assert again.arguments == config.arguments
    assert resolved_dict(again) == resolved_dict(config)


def test_two_ends_of_a_run_are_warned_of_only_where_both_were_given(load: Any) -> None:
    (warning,) = load("training: {train_iters: 5, train_epochs: 2}\n").warnings
    assert "training.train_iters  training.train_epochs is also given and takes precedence" in warning
    for given in ("train_iters: 5", "train_epochs: 2", "train_iters: 5, train_epochs: null"):
        assert not load(f"training: {{{given}}}\n").warnings


@pytest.mark.parametrize("value", ["[true]", "{a: true}", "3", "maybe"])
def test_what_is_no_switch(tmp_path: Path, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"training: {{use_deter_comp: {value}}}\n")
    with pytest.raises(ConfigError, match=r"run.yaml:1:28  training.use_deter_comp  .* is not true or false"):
        load_config(path)


def test_a_section_and_several_keys_have_the_place_of_what_was_given(load: Any) -> None:
    config = load_config(
        {"parallel": {"tensor_parallel_size": 2}, "training": {"lr": 0.1}}, ["parallel.encoder_plan.balance=true"]
    )
    keys = ("parallel.encoder_plan", "parallel.pipeline_parallel_size · parallel.tensor_parallel_size", "training.seed")
    located = config.locate(Problem("is off", key=key) for key in keys)
    assert [problem.where for problem in located] == ["command line", "configuration", ""]
