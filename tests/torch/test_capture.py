"""`capture`: what a loader does with tensors is what a load reads, bit for bit, or it is refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import ucformat
import ucformat.torch
from ucformat.errors import LayoutError, StateMismatch, UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from ucformat.torch import CapturedLayout

ENGINE = {"toy": "1"}
Weights = dict[str, torch.Tensor]
Loaded = "Iterator[tuple[str, torch.Tensor]]"


def checkpoint(folder: Path, weights: Weights) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in weights.items()}, folder / "model.safetensors")
    return folder


class Model(nn.Module):
    """A model of parameters of these shapes."""

    def __init__(self, dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.config = {"shapes": {n: list(s) for n, s in shapes.items()}}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 7.0, dtype=dtype)))


def bits(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor, in row-major order."""
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return bytes(flat.view(torch.uint8).numpy())


# Programs of random operations: PyTorch runs them on values, and `capture` on tensors without any.

Step = tuple[str, int, int, int, int]
KINDS = (
    *("slice", "narrow", "chunk", "transpose", "reshape", "unflatten", "flatten", "select"),
    *("unsqueeze", "squeeze", "expand", "clone", "contiguous", "cat", "stack", "cast", "permute"),
    *("index", "buffer", "pad"),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), *[st.integers(0, 11)] * 4), min_size=1, max_size=7
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def step(pool: list[torch.Tensor], how: Step) -> torch.Tensor:  # noqa: C901 - a case for each
    """One operation on tensors that earlier ones made."""
    kind, which, a, b, c = how
    x = pool[which % len(pool)]
    dim = a % x.dim() if x.dim() else 0
    n = x.shape[dim] if x.dim() else 1
    start = b % n
    length = 1 + c % (n - start)
    match kind:
        case "slice":
            return x[(slice(None),) * dim + (slice(start, start + length),)]
        case "narrow":
            return x.narrow(dim, start, length)
        case "chunk":
            return x.chunk(1 + b % 3, dim)[0]
        case "transpose":
            return x.transpose(dim, b % x.dim())
        case "permute":
            return x.permute(*reversed(range(x.dim())))
        case "reshape":
            return x.reshape(x.shape[::-1]) if b % 2 else x.reshape(-1, n)
        case "unflatten":
            return x.unflatten(dim, (-1, 2))
        case "flatten":
            return x.flatten()
        case "select":
            return x.select(dim, start)
        case "unsqueeze":
            return x.unsqueeze(b % (x.dim() + 1))
        case "squeeze":
            return x.squeeze()
        case "expand":
            return x.unsqueeze(0).expand(2, *x.shape)
        case "clone":
            return x.clone()
        case "contiguous":
            return x.contiguous()
        case "cat":
            return torch.cat([x, pool[b % len(pool)]], dim)
        case "stack":
            return torch.stack([x, x], b % (x.dim() + 1))
        case "cast":
            return x.to(DTYPES[b % 3])
        case "index":
            return x.index_select(dim, torch.tensor([start, 0, n - 1]))
        case "buffer":  # filled in two parts, and then in one part again
            made = torch.empty_like(x)
            made.copy_(pool[b % len(pool)])
            made.narrow(dim, start, length).copy_(x.narrow(dim, 0, length))
            return made
        case _:
            return nn.functional.pad(x, (0, b % 3))


def run(program: list[Step], weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    pool = list(weights.values())
    for how in program:
        pool.append(step(pool, how))
    return pool[-1]


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from(DTYPES), st.integers(0, 2))
def test_what_is_read_is_what_pytorch_computes(
    tmp_path_factory: pytest.TempPathFactory,
    program: list[Step],
    dtype: torch.dtype,
    halves: int,
) -> None:
    torch.manual_seed(len(program))
    weights = {"a": torch.randn(4, 6), "b": torch.randn(12, 2).to(torch.bfloat16)}
    try:
        wanted = run(program, weights).to(dtype)
    except (RuntimeError, IndexError, ZeroDivisionError):
        assume(False)
    assume(0 < wanted.numel() < 3000)

    def load(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        out, into = run(program, dict(tensors)), model.get_parameter("p").data
        if halves == 0 or not out.dim() or out.shape[0] < 2:
            into.copy_(out)
        elif halves == 1:
            into[:1].copy_(out[:1])
            into.narrow(0, 1, out.shape[0] - 1).copy_(out[1:])
        else:
            into.fill_(0)
            into.copy_(out)

    place = checkpoint(tmp_path_factory.mktemp("program"), weights)
    model = Model(dtype, p=tuple(wanted.shape))
    try:
        captured = ucformat.torch.capture(
            lambda w: load(model, w), place, model=model, engine=ENGINE
        )
    except UnsupportedError as error:
        # zeros in the middle, two casts, or rows that do not divide each other
        assert any(w in error.message for w in ("to 0", "converts", "divide", "once", "boxes"))  # noqa: PT017
        return
    except StateMismatch as error:
        assert "does not fill p" in error.message  # noqa: PT017 - all of it is padding
        return
    captured.load(model, place, engine=ENGINE)
    assert bits(model.get_parameter("p")) == bits(wanted)


# Loaders after public protocols and reports.

HIDDEN, HEADS, KV, WIDTH, MLP, VOCAB = 512, 8, 2, 64, 2048, 1000


class Layer(nn.Module):
    """The stacked parameters of a rank, as vLLM's layers have them."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        rows = (HEADS + 2 * KV) * WIDTH // tp
        for name, shape in {
            "qkv_proj": (rows, HIDDEN),
            "o_proj": (HIDDEN, HEADS * WIDTH // tp),
            "gate_up_proj": (2 * MLP // tp, HIDDEN),
            "down_proj": (HIDDEN, MLP // tp),
            "norm": (HIDDEN,),
        }.items():
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False)
            )


class Serving(nn.Module):
    """A model that loads as vLLM's do: `load_weights` names the shard, and `weight_loader` narrows by rank."""

    STACKED = (
        ("qkv_proj", "q_proj", "q"),
        ("qkv_proj", "k_proj", "k"),
        ("qkv_proj", "v_proj", "v"),
        ("gate_up_proj", "gate_proj", 0),
        ("gate_up_proj", "up_proj", 1),
    )

    def __init__(self, tp: int, rank: int) -> None:
        super().__init__()
        self.tp, self.rank = tp, rank
        self.layers = nn.ModuleList([Layer(tp) for _ in range(2)])
        padded = -(-VOCAB // 64) * 64
        self.embed = nn.Parameter(
            torch.empty(padded // tp, HIDDEN, dtype=torch.bfloat16), requires_grad=False
        )
        self.register_buffer("scale", torch.tensor(1.0))  # which no checkpoint has
        self.config = {"hidden_size": HIDDEN, "tp": tp}

    def weight_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard: str | int, rank: int
    ) -> None:
        if isinstance(shard, str):
            widths = {"q": HEADS * WIDTH, "k": KV * WIDTH, "v": KV * WIDTH}
            start = {"q": 0, "k": widths["q"], "v": widths["q"] + widths["k"]}[shard] // self.tp
            size = widths[shard] // self.tp
        else:
            size = MLP // self.tp
            start = shard * size
        data = param.data.narrow(0, start, size)
        loaded = loaded.narrow(0, rank * size, size)
        assert data.shape == loaded.shape
        data.copy_(loaded)

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], rank: int | None = None
    ) -> set[str]:
        rank = self.rank if rank is None else rank
        loaded = set()
        params = dict(self.named_parameters())
        for full, weight in weights:
            name = full.removeprefix("model.").removesuffix(".weight")
            if name == "embed":
                rows = params[name].shape[0]
                part = weight[rank * rows : (rank + 1) * rows]
                params[name][: part.shape[0]].data.copy_(part)
                params[name][part.shape[0] :].data.fill_(0)
            elif stacked := next((s for s in self.STACKED if s[1] in name), None):
                name = name.replace(stacked[1], stacked[0])
                self.weight_loader(params[name], weight, stacked[2], rank)
            elif name.endswith(("o_proj", "down_proj")):
                size = weight.shape[1] // self.tp
                params[name].data.copy_(weight.narrow(1, rank * size, size))
            else:
                params[name].data.copy_(weight)
            loaded.add(name)
        return loaded


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    torch.manual_seed(3)
    weights: Weights = {"model.embed.weight": torch.randn(VOCAB, HIDDEN)}
    for layer in range(2):
        for name, shape in {
            "q_proj": (HEADS * WIDTH, HIDDEN),
            "k_proj": (KV * WIDTH, HIDDEN),
            "v_proj": (KV * WIDTH, HIDDEN),
            "o_proj": (HIDDEN, HEADS * WIDTH),
            "gate_proj": (MLP, HIDDEN),
            "up_proj": (MLP, HIDDEN),
            "down_proj": (HIDDEN, MLP),
            "norm": (HIDDEN,),
        }.items():
            weights[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape)
    return checkpoint(tmp_path_factory.mktemp("served") / "hf", weights), weights


def captured_by(model: Serving, place: Path) -> CapturedLayout:
    return ucformat.torch.capture(
        model.load_weights, place, model=model, engine=ENGINE, rank=model.rank, ranks=model.tp
    )


class TestAServingRank:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_reads_its_own_bytes(
        self, served: tuple[Path, Weights], tmp_path: Path, rank: int
    ) -> None:
        place, weights = served
        wanted = Serving(2, rank)
        with torch.no_grad():
            wanted.load_weights(iter(weights.items()))
        captured_by(Serving(2, rank), place).save(tmp_path / "rank.json")
        captured = ucformat.torch.CapturedLayout.open(tmp_path / "rank.json")
        with torch.device("meta"):
            model = Serving(2, rank)
        model.scale = torch.tensor(1.0)
        captured.load(model, place, engine=ENGINE, rank=rank, ranks=2)
        for name, value in wanted.named_parameters():
            assert bits(model.get_parameter(name)) == bits(value), name
        assert captured.kept == ("scale",)
        plan = captured.plan(place)
        shard = sum(p.numel() * 4 for p in model.parameters())  # as they are stored
        assert plan.bytes_read <= 1.05 * shard
        assert plan.zero_filled if rank else not plan.zero_filled

    def test_reads_other_checkpoints(self, served: tuple[Path, Weights], tmp_path: Path) -> None:
        """One of arrays, of the same tensors, and of others in a folder that a view renames."""
        place, weights = served
        captured = captured_by(Serving(2, 1), place)
        model = Serving(2, 1)
        ucformat.convert(place, tmp_path / "universal")
        captured.load(model, tmp_path / "universal", engine=ENGINE, rank=1, ranks=2)
        other = checkpoint(tmp_path / "other", {f"x.{n}": t for n, t in weights.items()})
        renamed = ucformat.open(other, view=[{"rename": r"/x\.(.*)/", "to": r"\1"}])
        second = Serving(2, 1)
        captured.load(second, renamed, engine=ENGINE, rank=1, ranks=2)
        for name, value in second.named_parameters():
            assert bits(value) == bits(model.get_parameter(name)), name

    def test_the_document_is_a_layout_file(
        self, served: tuple[Path, Weights], tmp_path: Path
    ) -> None:
        place, _ = served
        captured_by(Serving(2, 0), place).save(tmp_path / "rank.json")
        layout = ucformat.Layout.load(tmp_path / "rank.json")
        viewed = ucformat.open(place, view=tmp_path / "rank.json")
        assert viewed["layers.0.qkv_proj"].shape == ((HEADS + 2 * KV) * WIDTH // 2, HIDDEN)
        model = Serving(2, 0)
        missing = ucformat.torch.load_into(model, place, layout=layout, rank=0, strict=False)
        assert missing.missing_keys == ["scale"]


def change(document: dict[str, Any], **captured: Any) -> CapturedLayout:
    document["captured"] |= captured
    return ucformat.torch.CapturedLayout(document)


class TestWhatHasChanged:
    @pytest.fixture
    def captured(self, served: tuple[Path, Weights]) -> CapturedLayout:
        return captured_by(Serving(2, 0), served[0])

    def refused(self, captured: CapturedLayout, model: nn.Module, place: Path, **given: Any) -> str:
        arguments: dict[str, Any] = {"engine": ENGINE, "rank": 0, "ranks": 2} | given
        with pytest.raises(StateMismatch) as error:
            captured.load(model, place, **arguments)
        return str(error.value)

    def test_is_named(self, captured: CapturedLayout, served: tuple[Path, Weights]) -> None:
        place, model = served[0], Serving(2, 0)
        before = {n: p.clone() for n, p in model.named_parameters()}
        assert "toy is 2, and was 1" in self.refused(captured, model, place, engine={"toy": "2"})
        assert "toy is not installed" in self.refused(captured, model, place, engine=None)
        assert "rank 1 of 2, and was 0 of 2" in self.refused(captured, model, place, rank=1)
        config = {"hidden_size": HIDDEN, "tp": 4}
        assert "config.tp: 4, and was 2" in self.refused(captured, model, place, config=config)
        other = type("Other", (Serving,), {})(2, 0)
        assert "Other, and was" in self.refused(captured, other, place)
        larger = Serving(2, 0)
        larger.layers[0].norm = nn.Parameter(torch.empty(HIDDEN + 1, dtype=torch.bfloat16))
        assert "the model.layers.0.norm.shape" in self.refused(captured, larger, place)
        larger.layers[0].norm = nn.Parameter(torch.empty(HIDDEN))
        assert "layers.0.norm.dtype: 'float32'" in self.refused(captured, larger, place)
        larger.layers[0].register_parameter("bias", nn.Parameter(torch.empty(1)))
        assert "layers.0.bias is new" in self.refused(captured, larger, place)
        with torch.device("meta"):
            empty = Serving(2, 0)
        assert "scale is on the meta device" in self.refused(captured, empty, place)
        for name, value in model.named_parameters():
            assert bits(value) == bits(before[name])

    def test_another_checkpoint_is_refused(
        self, captured: CapturedLayout, served: tuple[Path, Weights], tmp_path: Path
    ) -> None:
        weights = served[1]
        arguments: dict[str, Any] = {"engine": ENGINE, "rank": 0, "ranks": 2}
        name = "model.layers.1.norm.weight"
        for changed, message in (
            ({name: weights[name].half()}, r"norm.weight is float16 \[512\], and must be float32"),
            ({name: weights[name][:-1]}, r"norm.weight is float32 \[511\], and must be"),
        ):
            place = checkpoint(tmp_path / "changed", weights | changed)
            with pytest.raises(LayoutError, match=message):
                captured.load(Serving(2, 0), place, **arguments)
        place = checkpoint(tmp_path / "fewer", {n: t for n, t in weights.items() if n != name})
        with pytest.raises(LayoutError, match=r"needs model\.layers\.1\.norm\.weight"):
            captured.load(Serving(2, 0), place, **arguments)

    def test_a_document_that_contradicts_itself_is_refused(
        self, captured: CapturedLayout, tmp_path: Path
    ) -> None:
        with pytest.raises(LayoutError, match="contradicts itself about scale"):
            change(captured.document, kept=[])
        with pytest.raises(LayoutError, match="rank"):
            change(captured.document, rank=-1)
        plain = {k: v for k, v in captured.document.items() if k != "captured"}
        (tmp_path / "plain.json").write_text(json.dumps(plain))
        with pytest.raises(LayoutError, match="it has no section `captured`"):
            ucformat.torch.CapturedLayout.open(tmp_path / "plain.json")


Fill = "Callable[[Mapping[str, torch.Tensor], nn.Parameter], object]"


class TestWhatIsRefused:
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        weights = {
            "w": torch.randn(8, 8),
            "v": torch.randn(8, 8),
            "half": torch.randn(8, 8).half(),
            "one": torch.ones(()),
        }
        return checkpoint(tmp_path / "place", weights)

    def capture(
        self, place: Path, fill: Callable[[Weights, torch.Tensor], object], rows: int = 8
    ) -> CapturedLayout:
        model = Model(p=(rows, 8))

        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            fill(dict(weights), model.get_parameter("p").data)

        return ucformat.torch.capture(load, place, model=model, engine=ENGINE)

    @pytest.mark.parametrize(
        ("operation", "fill"),
        [
            ("aten.add.Tensor", lambda w, p: p.copy_(w["w"] + 1)),
            ("aten.mul.Tensor", lambda w, p: p.copy_(w["w"] * w["v"])),
            ("aten.mul_.Tensor", lambda w, p: p.copy_(w["w"].mul_(2))),
            ("aten._local_scalar_dense", lambda w, p: p.fill_(w["one"].item())),
            ("aten.equal", lambda w, p: torch.equal(w["w"], w["v"])),
            ("aten._local_scalar_dense", lambda w, p: bool(w["one"])),
            ("aten.flip", lambda w, p: p.copy_(w["w"].flip(0))),
            ("aten.sort", lambda w, p: p.copy_(w["w"].sort()[0])),
            ("aten.view.dtype", lambda w, p: p.copy_(w["w"].view(torch.int32))),
            ("aten._conj", lambda w, p: p.copy_(w["w"].to(torch.complex64).conj().real)),
            ("aten.index.Tensor", lambda w, p: p.copy_(w["w"][torch.ones(8, dtype=torch.bool)])),
            ("aten.index_put_", lambda w, p: p.index_put_((torch.arange(8),), w["w"])),
            ("aten.add_.Tensor", lambda w, p: p.copy_(w["w"]).add_(1)),
            ("aten.sum", lambda w, p: p.copy_(w["w"]).sum()),
        ],
    )
    def test_other_operations(
        self, place: Path, operation: str, fill: Callable[[Weights, torch.Tensor], object]
    ) -> None:
        with pytest.raises(UnsupportedError) as error:
            self.capture(place, fill)
        assert operation in str(error.value)
        assert any(name in str(error.value) for name in ("w", "one", "p"))

    def test_a_loader_that_goes_on(self, place: Path) -> None:
        def fill(w: Weights, p: torch.Tensor) -> None:
            try:
                p.copy_(w["w"] + 1)
            except Exception:  # noqa: BLE001 - as loaders do that collect errors
                p.copy_(w["w"])

        with pytest.raises(UnsupportedError, match=r"aten\.add\.Tensor to w"):
            self.capture(place, fill)

    @pytest.mark.parametrize(
        ("message", "fill"),
        [
            # vllm-project/vllm#14828: weights that were never initialized, with only a warning
            ("does not fill p from the checkpoint", lambda w, p: None),
            ("does not fill p exactly once", lambda w, p: p[:7].copy_(w["w"][:7])),
            ("more than once, with those of w", lambda w, p: p.copy_(w["w"]).copy_(w["v"])),
            ("more than once", lambda w, p: (p.copy_(w["w"]), p[2].copy_(w["v"][2]))),
            # vllm-project/vllm#503: padding rows of uninitialised memory, joined to the vocabulary
            (
                "values that do not come from the checkpoint",
                lambda w, p: p.copy_(torch.cat([w["w"][:6], torch.empty(2, 8).to(w["w"])])),
            ),
            ("sets elements of p to 3", lambda w, p: (p.fill_(3), p[:7].copy_(w["w"][:7]))),
            ("elements of p to 0", lambda w, p: (p.zero_(), p[1:].copy_(w["w"][1:]))),
            ("but by aten.normal_", lambda w, p: p.normal_()),
            (
                "converts half to float32, bfloat16, float16",
                lambda w, p: p.copy_(w["half"].bfloat16().half()),
            ),
        ],
    )
    def test_what_is_not_filled_once(
        self, place: Path, message: str, fill: Callable[[Weights, torch.Tensor], object]
    ) -> None:
        with pytest.raises((UnsupportedError, StateMismatch)) as error:
            self.capture(place, fill)
        assert message.removeprefix("converts half to float32, ") in str(error.value)

    def test_what_a_loader_needs(self, place: Path) -> None:
        with pytest.raises(UsageError, match="returned NoneType, not a model"):
            ucformat.torch.capture(lambda w: None, place, engine=ENGINE)
        model = Model(p=(8, 8))
        load = lambda w: model.p.data.copy_(dict(w)["w"])  # noqa: E731
        with pytest.raises(UsageError, match="of no installed package"):
            ucformat.torch.capture(load, place, model=model)
        with pytest.raises(UsageError, match="not JSON"):
            ucformat.torch.capture(load, place, model=model, engine=ENGINE, config={"a": object()})
        with pytest.raises(UsageError, match="no rank 3 of 2"):
            ucformat.torch.capture(load, place, model=model, engine=ENGINE, rank=3, ranks=2)


class TestWhatIsUnderstood:
    def loaded(
        self,
        tmp_path: Path,
        weights: Weights,
        fill: Callable[[Weights, nn.Module], object],
        make: Callable[[], nn.Module],
    ) -> tuple[nn.Module, nn.Module, CapturedLayout]:
        """What the loader makes, what is read, and the layout."""
        place, wanted, model = checkpoint(tmp_path / "place", weights), make(), make()
        with torch.no_grad():
            fill(weights, wanted)
        layout = ucformat.torch.capture(
            lambda w: fill(dict(w), model), place, model=model, engine=ENGINE
        )
        fresh = make()
        layout.load(fresh, place, engine=ENGINE)
        for name, value in wanted.state_dict().items():
            assert bits(fresh.state_dict()[name]) == bits(value), name
        return wanted, fresh, layout

    def test_a_square_matrix_that_is_transposed(self, tmp_path: Path) -> None:
        """NVIDIA-NeMo/Megatron-Bridge#3743: a shape does not tell it."""

        def fill(w: Weights, m: Any) -> None:
            m.p.data.copy_(torch.stack([w["a"].t(), w["b"]]))

        weights = {"a": torch.randn(8, 8), "b": torch.randn(8, 8)}
        _, _, layout = self.loaded(tmp_path, weights, fill, lambda: Model(p=(2, 8, 8)))
        a, b = layout.document["view"][1]["compose"]["p"]["parts"]
        assert (a["axes"], b["axes"]) == ([None, 1, 0], [None, 0, 1])

    def test_a_cast_between(self, tmp_path: Path) -> None:
        """Values are rounded to bfloat16 and kept in float32: what `from_pretrained(dtype=)` does to fp32 modules."""

        def fill(w: Weights, m: Any) -> None:
            m.p.data.copy_(w["a"].to(torch.bfloat16))
            m.q.data.copy_(torch.cat([w["a"].to(torch.bfloat16), w["b"]]))

        weights = {"a": torch.randn(4, 8), "b": torch.randn(4, 8).bfloat16()}
        _, _, layout = self.loaded(tmp_path, weights, fill, lambda: Model(p=(4, 8), q=(8, 8)))
        composed = layout.document["view"][1]["compose"]
        assert composed["p"]["parts"] == [{"from": "a", "cast": "bfloat16"}]

    def test_zeros_that_are_joined(self, tmp_path: Path) -> None:
        """HabanaAI/vllm-fork#1432: a vocabulary that is padded by `cat` with zeros."""

        def fill(w: Weights, m: Any) -> None:
            m.p.data.copy_(torch.cat([w["a"], torch.zeros(3, 8)]))

        self.loaded(tmp_path, {"a": torch.randn(5, 8)}, fill, lambda: Model(p=(8, 8)))

    def test_parameters_that_are_replaced(self, tmp_path: Path) -> None:
        def fill(w: Weights, m: Any) -> None:
            m.p = nn.Parameter(w["a"].t().contiguous())
            m.get_parameter("q").data = w["b"][:2].clone()

        weights = {"a": torch.randn(4, 8), "b": torch.randn(4, 8)}
        self.loaded(tmp_path, weights, fill, lambda: Model(p=(8, 4), q=(2, 8)))

    def test_what_is_overwritten(self, tmp_path: Path) -> None:
        """Values that a model had before, however it got them."""

        def fill(w: Weights, m: Any) -> None:
            torch._foreach_mul_([m.p.data, m.q.data], 2)
            m.p.data.normal_()
            m.p.data.copy_(w["a"])
            m.q.data.fill_(1)
            m.q.data[:, :3].copy_(w["a"][:, :3])
            m.q.data[:, 3:].copy_(w["a"][:, 3:])

        weights = {"a": torch.randn(4, 8)}
        self.loaded(tmp_path, weights, fill, lambda: Model(p=(4, 8), q=(4, 8)))

    def test_ties(self, tmp_path: Path) -> None:
        class Tied(Model):
            def __init__(self) -> None:
                super().__init__(p=(4, 8))
                self.q = self.p

        def fill(w: Weights, m: Any) -> None:
            m.p.data.copy_(w["a"])

        _, fresh, layout = self.loaded(tmp_path, {"a": torch.randn(4, 8)}, fill, Tied)
        assert layout.document["captured"]["ties"] == {"q": "p"}
        assert fresh.get_parameter("q") is fresh.get_parameter("p")

    def test_a_loader_that_always_takes_the_first_shard(self, served: tuple[Path, Weights]) -> None:
        """vllm-project/vllm-gguf-plugin#103: shapes are right, and half of each tensor is read by nobody."""
        place = served[0]
        layouts = []
        for rank in range(2):
            model = Serving(2, rank)
            layouts.append(
                ucformat.torch.capture(
                    lambda w, m=model: m.load_weights(w, rank=0),  # type: ignore[misc]
                    place,
                    model=model,
                    engine=ENGINE,
                    rank=rank,
                    ranks=2,
                )
            )
        with pytest.raises(StateMismatch, match=r"no rank reads .* of model.embed.weight"):
            ucformat.torch.CapturedLayout.check_ranks(layouts)
        ucformat.torch.CapturedLayout.check_ranks(
            [captured_by(Serving(2, rank), place) for rank in range(2)]
        )
