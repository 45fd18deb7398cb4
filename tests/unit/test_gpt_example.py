"""The example GPT and its LightningModule, in one process."""

from __future__ import annotations

import math
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from examples.gpt.data import TextData
from examples.gpt.model import GPT, GPTConfig, ResidualProjection, RotaryTable
from examples.gpt.module import GPTModule, warmup_cosine
from examples.gpt.sample import SampleText

TINY = {"vocab_size": 32, "block_size": 16, "num_layers": 2, "num_heads": 2, "hidden_size": 16}
VARIANTS = {
    "learned": {"positions": "learned"},
    "rotary": {"positions": "rotary"},
    "swiglu": {"activation": "swiglu"},
    "untied": {"tied": False},
    "biased": {"bias": True, "key_bias": True},
}


def tiny(**changes: object) -> GPTConfig:
    return GPTConfig(**{**TINY, **changes})


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class TestModel:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_a_later_token_does_not_change_earlier_logits(self, variant: str) -> None:
        model = GPT(tiny(**VARIANTS[variant])).eval()
        tokens_BT = torch.randint(32, (2, 16))
        changed_BT = tokens_BT.clone()
        changed_BT[:, 9] = (changed_BT[:, 9] + 1) % 32
        before, after = model(tokens_BT), model(changed_BT)
        torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
        assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=-1).gt(1e-5).all()

    @pytest.mark.parametrize("positions", ["learned", "rotary"])
    def test_the_order_of_tokens_matters(self, positions: str) -> None:
        model = GPT(tiny(positions=positions)).eval()
        forward, swapped = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
        assert not torch.allclose(model(forward)[:, -1], model(swapped)[:, -1], atol=1e-5)

    def test_rotary_scores_depend_on_distance_only(self) -> None:
        table = RotaryTable(16, 8)
        query_H, key_H = torch.randn(8), torch.randn(8)
        query_TH, key_TH = table(query_H.expand(16, 8)), table(key_H.expand(16, 8))
        score_TT = query_TH @ key_TH.T
        for offset in range(16):
            diagonal = score_TT.diagonal(-offset)
            torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)

    def test_tied_head_is_the_embedding(self) -> None:
        tied, untied = GPT(tiny()), GPT(tiny(tied=False))
        assert tied.head.weight is tied.embedding.weight
        assert num_parameters(untied) - num_parameters(tied) == 32 * 16

    def test_only_asked_for_biases_exist(self) -> None:
        def biased(**changes: bool) -> set[str]:
            names = (name for name, _ in GPT(tiny(**changes)).named_parameters())
            return {name.split(".")[-2] for name in names if name.endswith("bias")}

        everything = {"attention_norm", "mlp_norm", "norm", "q", "v", "o", "up", "down"}
        assert biased() == set()
        assert biased(bias=True) == everything
        assert biased(bias=True, key_bias=True) == everything | {"k"}

    def test_residual_projections_start_smaller_by_depth(self) -> None:
        model = GPT(tiny(num_layers=8, hidden_size=128, num_heads=4))
        stds = {
            isinstance(module, ResidualProjection): [] for module in model.modules() if isinstance(module, nn.Linear)
        }
        for module in model.modules():
            if isinstance(module, nn.Linear):
                stds[isinstance(module, ResidualProjection)].append(module.weight.std().item())
        assert stds[False] == pytest.approx([0.02] * len(stds[False]), rel=0.05)
        assert stds[True] == pytest.approx([0.02 / math.sqrt(16)] * 16, rel=0.05)

    def test_an_untrained_model_knows_nothing(self) -> None:
        logits_BTV = GPT(tiny())(torch.randint(32, (4, 16)))
        loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), torch.randint(32, (64,)))
        assert loss.item() == pytest.approx(math.log(32), abs=0.1)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_meta_build_and_later_init_equal_init_at_once(self, variant: str) -> None:
        config = tiny(**VARIANTS[variant])
        direct = GPT(config)
        torch.manual_seed(1)
        direct.apply(direct._init_weights)
        with torch.device("meta"):
            late = GPT(config)
        assert {parameter.device.type for parameter in late.parameters()} == {"meta"}
        late.to_empty(device="cpu")
        late.tie_weights()
        torch.manual_seed(1)
        late.apply(late._init_weights)
        assert late.state_dict().keys() == direct.state_dict().keys()
        tokens_BT = torch.randint(32, (2, 16))
        torch.testing.assert_close(late(tokens_BT), direct(tokens_BT), rtol=0, atol=0)

    def test_rotary_tables_stay_out_of_checkpoints(self) -> None:
        model = GPT(tiny(positions="rotary"))
        assert not [name for name in model.state_dict() if "rotary" in name]
        assert list(model.named_buffers())

    def test_heads_are_inferred_from_what_a_rank_holds(self) -> None:
        """Half of the rows of q, k, v and the matching columns of o, twice, add up to the whole."""
        attention = GPT(tiny(hidden_size=32, num_heads=4)).blocks[0].attention.eval()
        x_BTC = torch.randn(2, 8, 32)
        whole = attention(x_BTC)
        weights = {name: getattr(attention, name).weight.data for name in "qkvo"}
        parts = []
        for half in (slice(0, 16), slice(16, 32)):
            for name in "qkv":
                getattr(attention, name).weight = nn.Parameter(weights[name][half])
            attention.o.weight = nn.Parameter(weights["o"][:, half])
            parts.append(attention(x_BTC))
        torch.testing.assert_close(sum(parts), whole)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_tensor_plan_names_every_matrix_once(self, variant: str) -> None:
        model = GPT(tiny(**VARIANTS[variant]))
        planned = {pattern.replace("*", str(layer)) for pattern in model.tp_plan for layer in range(2)}
        matrices = {
            name
            for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, nn.Embedding)) and name != "positions"
        }
        assert planned == matrices

    def test_too_long_a_sequence_is_refused(self) -> None:
        with pytest.raises(ValueError, match="17 tokens is longer than block_size=16"):
            GPT(tiny())(torch.zeros(1, 17, dtype=torch.long))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_heads": 3}, "hidden_size=16 does not divide into num_heads=3.*hidden_size=18"),
            ({"num_heads": 16, "positions": "rotary"}, "even size.*= 1$"),
            ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
            ({"num_layers": 0}, "num_layers=0 must be at least 1"),
            ({"mlp_size": 0}, "mlp_size=0 must be at least 1"),
            ({"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\)"),
            ({"activation": "relu"}, "activation='relu' must be one of gelu, swiglu"),
            ({"positions": "none"}, "positions='none' must be one of learned, rotary"),
        ],
    )
    def test_impossible_sizes_are_refused(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            tiny(**changes)

    def test_swiglu_width_is_two_thirds_of_gelus_rounded_up(self) -> None:
        assert GPTConfig(hidden_size=128).inner_size == 512
        assert GPTConfig(hidden_size=128, activation="swiglu").inner_size == 384
        assert GPTConfig(hidden_size=128, mlp_size=100).inner_size == 100

    def test_dropout_works_in_training_only(self) -> None:
        model = GPT(tiny(dropout=0.5))
        tokens_BT = torch.randint(32, (1, 8))
        assert not torch.equal(model(tokens_BT), model(tokens_BT))
        model.eval()
        assert torch.equal(model(tokens_BT), model(tokens_BT))


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(outputs["loss"].item())
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.fixture
def data(tmp_path) -> TextData:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return TextData(path=str(text), block_size=16, batch_size=8, cache_dir=str(tmp_path / "cache"))


def byte_module(**arguments: object) -> GPTModule:
    network = tiny(vocab_size=256, positions="rotary")
    optimizer = partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    return GPTModule(network, **{"optimizer": optimizer, "warmup_steps": 4, **arguments})


def trainer_for(tmp_path, *callbacks: pl.Callback, **arguments: object) -> pl.Trainer:
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 20,
        "limit_val_batches": 2,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": tmp_path,
        "callbacks": list(callbacks),
    }
    return pl.Trainer(**{**settings, **arguments})


class TestModule:
    def test_it_learns_and_follows_its_schedule(self, tmp_path, data: TextData) -> None:
        recorder = Recorder()
        trainer = trainer_for(tmp_path, recorder, val_check_interval=10)
        trainer.fit(byte_module(), datamodule=data)
        assert recorder.losses[0] > 5.0
        assert recorder.losses[-1] < recorder.losses[0] - 1.0
        assert {"train_loss", "val_loss"} <= trainer.callback_metrics.keys()
        # The rate after step n is the one for step n + 1.
        expected = [1e-2 * warmup_cosine(step, 4, 20, 0.1) for step in range(1, 21)]
        assert recorder.rates == pytest.approx(expected)

    def test_matrices_decay_and_vectors_do_not(self, tmp_path, data: TextData) -> None:
        trainer = trainer_for(tmp_path, max_steps=1)
        module = byte_module()
        trainer.fit(module, datamodule=data)
        decay = {
            id(parameter): group["weight_decay"]
            for group in trainer.optimizers[0].param_groups
            for parameter in group["params"]
        }
        assert decay == {id(p): 0.1 if p.dim() >= 2 else 0.0 for p in module.parameters()}

    def test_frozen_parameters_are_left_to_themselves(self, tmp_path, data: TextData) -> None:
        trainer = trainer_for(tmp_path, max_steps=2)
        module = byte_module()
        frozen = module.network.embedding.weight.requires_grad_(False)
        before = frozen.clone()
        trainer.fit(module, datamodule=data)
        assert torch.equal(frozen, before)

    def test_checkpoint_opens_safely_and_without_arguments(self, tmp_path, data: TextData) -> None:
        trainer = trainer_for(tmp_path, max_steps=2)
        module = byte_module()
        trainer.fit(module, datamodule=data)
        path = tmp_path / "run.ckpt"
        trainer.save_checkpoint(path)
        torch.load(path, weights_only=True)
        loaded = GPTModule.load_from_checkpoint(path)
        tokens_BT = torch.randint(256, (1, 16))
        torch.testing.assert_close(loaded.eval()(tokens_BT), module.eval()(tokens_BT))
        assert loaded.config == module.config

    def test_meta_module_is_built_late_and_once(self) -> None:
        module = byte_module(meta=True)
        assert module.network is None
        module.configure_model()
        network = module.network
        module.configure_model()
        assert module.network is network
        assert {parameter.device.type for parameter in module.parameters()} == {"meta"}

    def test_network_may_be_given_as_a_mapping(self) -> None:
        assert GPTModule(TINY).config == tiny()

    def test_without_an_end_the_rate_stays(self) -> None:
        assert warmup_cosine(0, 10, math.inf, 0.1) == pytest.approx(0.1)
        assert warmup_cosine(10_000, 10, math.inf, 0.1) == 1.0

    def test_schedule_ends_at_its_floor_and_stays_there(self) -> None:
        assert warmup_cosine(9, 10, 110, 0.1) == 1.0
        assert warmup_cosine(60, 10, 110, 0.1) == pytest.approx(0.55)
        assert warmup_cosine(110, 10, 110, 0.1) == pytest.approx(0.1)
        assert warmup_cosine(500, 10, 110, 0.1) == pytest.approx(0.1)
        assert warmup_cosine(0, 0, 10, 0.1) == 1.0


class TestGenerate:
    def test_greedy_takes_the_likeliest_token_each_time(self) -> None:
        module = GPTModule(tiny()).eval()
        tokens_BT = module.generate(torch.tensor([[1, 2], [3, 4]]), num_tokens=20)
        assert tokens_BT.shape == (2, 22)
        for end in range(2, 22):
            window_BT = tokens_BT[:, max(0, end - 16) : end]
            assert torch.equal(module(window_BT)[:, -1].argmax(dim=-1), tokens_BT[:, end])

    def test_draws_come_from_the_best_and_repeat_with_the_seed(self) -> None:
        module = GPTModule(tiny()).eval()
        prompt_BT = torch.tensor([[1]])

        def draw(seed: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed)
            return module.generate(prompt_BT, 12, top_k=3, temperature=5.0, generator=generator)

        assert torch.equal(draw(1), draw(1))
        assert len({tuple(draw(seed)[0].tolist()) for seed in range(5)}) > 1
        tokens_BT = draw(2)
        for end in range(1, 13):
            best = module(tokens_BT[:, :end])[:, -1].topk(3).indices
            assert tokens_BT[0, end] in best

    def test_mode_and_gradients_are_left_alone(self) -> None:
        module = GPTModule(tiny(dropout=0.5)).train()
        assert not module.generate(torch.tensor([[1]]), 2).requires_grad
        assert module.training

    def test_sample_is_printed_at_the_end(self, tmp_path, data: TextData, capsys) -> None:
        sample = SampleText(prompt="the ", num_tokens=8, top_k=1)
        trainer_for(tmp_path, sample, max_steps=2).fit(byte_module(), datamodule=data)
        assert "A sample after 2 steps:\n\nthe " in capsys.readouterr().out

    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(ValueError, match="prompt must not be empty"):
            SampleText(prompt="")
