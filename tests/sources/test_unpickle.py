from __future__ import annotations

import argparse
import collections
import contextlib
import datetime as dt
import os
import pickle
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.sources.interpreters import INTERPRETERS
from tests.sources.torch_files import call, glob, integer, pickled, storage, tensor, text, tuple_of
from ucformat.errors import IntegrityError, UcformatError, UnsafeError, UnsupportedError
from ucformat.reading.stand_ins import Dtype, Inert, NdArray, StoredTensor, why_refused
from ucformat.sources.pickle import unpickler
from ucformat.sources.pickle.allowed import PARTS
from ucformat.sources.pickle.unpickler import unpickle

STORAGES = {"0": 16, "empty": 0}


@pytest.fixture(params=INTERPRETERS, autouse=True)
def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickler, "interpret", request.param)


def load(data: bytes, **options: Any) -> Any:
    return unpickle(data, file="x.pt", storage_nbytes=STORAGES.__getitem__, **options)


class Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_back(protocol: int) -> None:
    shared: list[int] = [1]
    value: dict[Any, Any] = {
        "none": None,
        "bool": [True, False],
        "int": [0, 255, 65535, -1, 1 << 40, -(1 << 90)],
        "float": 1.5,
        "text": "é" * 300,
        "bytes": b"abc",
        "tuple": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "set": {1, 2},
        "frozen": frozenset({3}),
        "shared": [shared, shared],
        5: {"deep": [[[]]]},
        "complex": 1 + 2j,
        "slice": slice(1, None, 2),
        "date": dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
        "span": dt.timedelta(days=1),
    }
    found = load(pickle.dumps(value, protocol))
    assert found == value
    assert found["shared"][0] is found["shared"][1]


@pytest.mark.parametrize("protocol", [2, 4])
def test_containers_and_classes(protocol: int) -> None:
    def again(value: Any) -> Any:
        return load(pickle.dumps(value, protocol))

    assert again(collections.OrderedDict(a=1)) == {"a": 1}
    assert again(collections.defaultdict(list, a=[1])) == {"a": [1]}
    assert again(collections.Counter("aab")) == {"a": 2, "b": 1}
    assert again(collections.deque([1, 2], 5)) == [1, 2]
    assert again(Path("/a/b")) == PurePosixPath("/a/b")
    assert again(np.float64(2.5)) == 2.5
    arguments = again(argparse.Namespace(lr=1))
    assert isinstance(arguments, Inert)
    assert (arguments.name, arguments.get("lr")) == ("argparse.Namespace", 1)


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize(
    "array", [np.arange(6, dtype="<u4").reshape(2, 3), np.zeros((0, 2)), np.array([True])]
)
def test_numpy_arrays(protocol: int, array: Any) -> None:
    found = load(pickle.dumps(array, protocol))
    assert isinstance(found, NdArray)
    assert (found.shape, found.data) == (array.shape, array.tobytes())
    assert np.dtype(found.dtype) == array.dtype


def test_numpy_objects_are_refused() -> None:
    with pytest.raises(UnsafeError, match="dtype"):
        load(pickle.dumps(np.array([{}], dtype=object), 2))


def test_random_states_are_inert() -> None:
    assert load(pickle.dumps(np.random.default_rng(1), 2)) is not None


def test_tensors() -> None:
    assert load(pickled(tensor())) == StoredTensor("0", "float32", (2, 2), (2, 1), 0, 4)
    assert load(pickled(tensor((), (), 3))).offset == 3
    assert load(pickled(tensor((0, 7), (7, 1), 0, storage("empty", 0)))).size == 0
    assert load(pickled(tensor((5, 4), (0, 1)))).shape == (5, 4)  # expanded
    parameter = call(glob("torch._utils", "_rebuild_parameter"), tensor(), b"\x88", b"N")
    assert load(pickled(parameter)).shape == (2, 2)
    untyped = storage("0", 16, "UntypedStorage")
    v3 = glob("torch._utils", "_rebuild_tensor_v3")
    sizes = [tuple_of(integer(16)), tuple_of(integer(1))]
    found = load(
        pickled(
            call(v3, untyped, integer(0), *sizes, b"\x89", b"N", glob("torch", "float8_e4m3fn"))
        )
    )
    assert (found.dtype, found.numel) == ("float8_e4m3fn", 16)
    assert load(pickled(glob("torch", "bfloat16"))) == Dtype("bfloat16")
    assert load(pickled(call(glob("torch", "Size"), tuple_of(integer(2), integer(3))))) == (2, 3)


@pytest.mark.parametrize(
    "bad",
    [
        tensor((2, 3), (3, 1)),
        tensor((2, 2), (2, 1), 1),
        tensor((-1,), (1,)),
        tensor((2,), (-1,)),
        tensor((2,), (1,), -1),
        tensor((2, 2), (1,)),
        tensor((1 << 60, 1 << 60), (1, 1)),
        tensor((1 << 40,), (0,)),
        tensor(of=b"N"),
        tensor(of=storage(numel=5)),
        tensor(of=storage(numel=-1)),
        tensor((1,) * 65, (1,) * 65),
    ],
)
def test_tensors_outside_their_storage_are_caught(bad: bytes) -> None:
    with pytest.raises((IntegrityError, UnsafeError, UnsupportedError), match=r"x\.pt"):
        load(pickled(bad))


def test_a_flag_that_changes_the_values_refuses_the_tensor() -> None:
    sizes = [tuple_of(integer(4)), tuple_of(integer(1))]
    special = b"}" + text("conj") + b"\x88s"
    conj = call(
        glob("torch._utils", "_rebuild_tensor_v2"),
        storage(),
        integer(0),
        *sizes,
        b"\x89",
        b"N",
        special,
    )
    found = load(pickled(conj))
    assert (found.shape, found.readable) == ((4,), False)
    assert "resolve_conj" in why_refused(found.dtype)


LAYOUT = call(glob("torch.serialization", "_get_layout"), text("torch.sparse_coo"))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("_utils._rebuild_sparse_tensor", (LAYOUT, tuple_of(text("x"), text("y")))),
        ("_utils._rebuild_sparse_tensor", (LAYOUT, tuple_of(tensor(), tensor()))),
        (
            "_utils._rebuild_sparse_tensor",
            (text("torch.sparse_coo"), tuple_of(tensor(), tuple_of(integer(4)))),
        ),
        ("_utils._rebuild_nested_tensor", (text("x"),)),
        ("_utils._rebuild_meta_tensor_no_storage", (text("float32"), tuple_of(integer(4)))),
        (
            "_utils._rebuild_meta_tensor_no_storage",
            (glob("torch", "float32"), tuple_of(integer(-4))),
        ),
        ("_utils._rebuild_device_tensor_from_cpu_tensor", (text("x"), glob("torch", "float32"))),
        (
            "_utils._rebuild_wrapper_subclass",
            (glob("torch.masked.x", "M"), text("x"), tuple_of(integer(4))),
        ),
        ("_tensor._rebuild_from_type_v2", (text("x"), text("x"), tuple_of(), b"N")),
        (
            "_tensor._rebuild_from_type_v2",
            (glob("torch", "Size"), glob("torch.masked.x", "M"), tuple_of(), b"N"),
        ),
    ],
)
def test_tensors_of_other_kinds_that_are_damaged(name: str, args: tuple[bytes, ...]) -> None:
    module, _, function = f"torch.{name}".rpartition(".")
    with pytest.raises(IntegrityError, match=r"x\.pt: a .*tensor"):
        load(pickled(call(glob(module, function), *args)))


def test_a_tensor_that_was_copied_from_a_device() -> None:
    rebuild = glob("torch._utils", "_rebuild_device_tensor_from_cpu_tensor")
    same, other = (
        load(pickled(call(rebuild, tensor(), glob("torch", d), text("xla:0"))))
        for d in ("float32", "half")
    )
    assert (same.readable, other.readable) == (True, False)
    assert why_refused(other.dtype) == "is float16, stored as float32"


@pytest.mark.parametrize(
    "module",
    ["deepspeed.runtime.zero.config", "megatron.core.enums", "transformers", "torch.optim.adam"],
)
def test_framework_classes_are_inert(module: str) -> None:
    made = call(glob(module, "Thing"), integer(1)) + b"}" + text("a") + integer(2) + b"sb"
    found = load(pickled(made))
    assert isinstance(found, Inert)
    assert (found.name, found.args, found.state) == (f"{module}.Thing", (1,), {"a": 2})


def test_inert_containers_keep_their_items() -> None:
    listing = glob("deepspeed.x", "L") + b")\x81(" + integer(1) + integer(2) + b"e"
    mapping = glob("deepspeed.x", "D") + b")\x81(" + text("a") + integer(2) + b"u"
    assert load(pickled(listing)).items == [1, 2]
    assert load(pickled(mapping)).items == [("a", 2)]


def test_members_of_an_enumeration_of_python_3_11() -> None:
    found = load(
        pickled(call(glob("builtins", "getattr"), glob("deepspeed.x", "Stage"), text("weights")))
    )
    assert (found.name, found.args) == ("deepspeed.x.Stage", ("weights",))


REFUSED = """
    os.system posix.system nt.system subprocess.Popen builtins.eval builtins.exec builtins.__import__ builtins.open
    __builtin__.compile builtins.setattr builtins.type builtins.object functools.partial operator.attrgetter
    operator.itemgetter types.FunctionType types.CodeType importlib.import_module pickle.loads torch.load torch.hub.load
    torch.jit.load torch._utils._rebuild_wrapper numpy.load numpy.fromfile shutil.rmtree webbrowser.open
    deepspeedy.x __main__.Config copyreg.__newobj__ codecs.decode _codecs.decode ctypes.CDLL sys.exit runpy.run_path
"""


def test_what_is_refused_is_named(subtests: pytest.Subtests) -> None:
    for whole in REFUSED.split():
        module, _, name = whole.rpartition(".")
        said = rf"x\.pt: (.|\n)*{re.escape(whole)}"
        with subtests.test(whole=whole), pytest.raises(UnsafeError, match=said):
            load(pickled(call(glob(module, name), text("x"))))


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_run(tmp_path: Path, protocol: int) -> None:
    command = f"touch {tmp_path}/pwned"
    for evil in (
        Evil(os.system, (command,)),
        Evil(eval, (f"__import__('os').system('{command}')",)),
    ):
        with pytest.raises(UnsafeError):
            load(pickle.dumps({"a": [evil]}, protocol))
    assert not list(tmp_path.iterdir())


def test_getattr_of_an_object_is_refused() -> None:
    with pytest.raises(UnsafeError, match=r"builtins\.getattr"):
        load(pickled(call(glob("builtins", "getattr"), tensor(), text("__class__"))))


def test_a_package_of_ones_own_can_be_allowed() -> None:
    made = pickled(call(glob("mine.config", "Config"), integer(1)))
    with pytest.raises(UnsafeError, match=r"options=\{'allow': \['mine'\]\}"):
        load(made)
    assert load(made, allow=("mine",)).args == (1,)


@pytest.mark.parametrize(
    "trick",
    [
        b"\x82\x01",  # extension codes
        b"\x83\x01\x01",
        b"\x84\x01\x01\x01\x01",
        b"(i" + b"os\nsystem\n",  # old-style instances
        b"(" + glob("os", "system") + text("x") + b"o",
        b"P0\n",  # persistent ids of protocol 0
        text("0") + b"Q",
        tuple_of(text("module"), text("x"), text("0"), text("cpu"), integer(4)) + b"Q",
        tuple_of(text("storage"), text("x"), text("0"), text("cpu"), integer(4)) + b"Q",
        tuple_of(
            text("storage"), glob("torch", "FloatStorage"), integer(0), text("cpu"), integer(4)
        )
        + b"Q",
        tuple_of(text("storage"), glob("torch", "FloatStorage"), text("9"), text("cpu"), integer(4))
        + b"Q",
        call(integer(5), text("x")),
        call(text("x")),
        call(tensor(), text("x")),
        glob("builtins", "dict") + integer(5) + b"R",
        b"]" + b"}b",  # state of a list
        text("x") + b"}" + text("__class__") + integer(1) + b"sb",
        b"}(" + tuple_of(tuple_of(integer(1))) + integer(1) + b"u",  # nested keys
        b"}(]" + integer(1) + b"u",
        b"h\x05",
        b"j\xff\xff\xff\x7f",
        b"X\xff\xff\xff\xff",
        b"\x8e" + b"\xff" * 8,
        b"\x8b\xff\xff\xff\xff",
        b"\x96" + b"\xff" * 8,
        b"\x85",
        b"0",
        b"t",
        b"}(" + integer(1) + b"u",
        call(glob("builtins", "bytearray"), integer(1 << 40)),
        call(glob("builtins", "bytes"), integer(1 << 40)),
        call(glob("_codecs", "encode"), text("x"), text("zip")),
        call(glob("datetime", "timedelta"), integer(1 << 80)),
        call(glob("torch", "Size"), text("x")),
        glob("collections", "OrderedDict") + tuple_of(b"]" + tuple_of(tensor())) + b"R",
        b"\x97",
        b"I5\n",
    ],
)
def test_tricks_are_errors_of_ours_that_name_the_file(trick: bytes) -> None:
    with pytest.raises(UcformatError, match=r"x\.pt"):
        load(b"\x80\x02" + trick + b".")


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"\x80\x02", b"\x80\x07N.", b"\x80\x02.", b"\x80\x02N", os.urandom(200)]
)
def test_garbage(data: bytes) -> None:
    with pytest.raises(UcformatError, match=r"x\.pt"):
        load(data)


def test_every_cut_of_a_pickle_is_an_error() -> None:
    whole = pickled(tuple_of(tensor(), call(glob("deepspeed.x", "T"), text("a")), integer(5)))
    for stop in range(len(whole)):
        with pytest.raises(UcformatError):
            load(whole[:stop])


def test_every_flipped_byte_is_harmless() -> None:
    whole = pickled(tuple_of(tensor(), call(glob("deepspeed.x", "T"), text("a")), integer(5)))
    for at in range(len(whole)):
        for flip in (1, 0x80, 0xFF):
            data = bytearray(whole)
            data[at] ^= flip
            with contextlib.suppress(UcformatError):
                load(bytes(data))


def test_depth_is_no_matter() -> None:
    value = load(pickled(b"]" * 100_000 + b"a" * 99_999))
    for _ in range(99_999):
        value = value[0]
    assert value == []


class Met:
    """How often keys are compared, of which all have one hash."""

    times = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        Met.times += 1
        return self is other


@pytest.mark.parametrize(
    "make",
    [
        dict.fromkeys,
        lambda keys: {(k, 1): None for k in keys},
        lambda keys: dict.fromkeys(map(float, keys)),
        set,
        frozenset,
        collections.OrderedDict.fromkeys,
        lambda keys: [set(keys[i : i + 500]) for i in range(0, len(keys), 500)],
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_keys_that_meet_are_compared_no_more_than_the_file_justifies(
    monkeypatch: pytest.MonkeyPatch, make: Any, protocol: int
) -> None:
    monkeypatch.setattr("ucformat.sources.pickle.unpickler._MIN_COLLISIONS", 1000)
    monkeypatch.setattr("ucformat.sources.pickle.unpickler._COLLISIONS_PER_BYTE", 1)
    monkeypatch.setattr("ucformat.sources.pickle.allowed.checked_key", Met)
    monkeypatch.setattr("ucformat.sources.pickle.unpickler.checked_key", Met)
    Met.times = 0
    value = make(list(range(100_000, 102_000)))
    data = pickle.dumps(value, protocol)
    with contextlib.suppress(UnsafeError):
        load(data)
    assert Met.times <= len(data)


def test_many_keys_of_one_hash_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucformat.sources.pickle.unpickler._MIN_COLLISIONS", 1 << 16)
    monkeypatch.setattr("ucformat.sources.pickle.unpickler._COLLISIONS_PER_BYTE", 1)
    keys = [(i // 7 * sys.hash_info.modulus, i % 7 * sys.hash_info.modulus) for i in range(21)]
    assert len({hash(k) for k in keys}) == 1
    assert load(pickle.dumps(dict.fromkeys(keys), 2)) == dict.fromkeys(keys)
    many = [
        tuple(int(d) * sys.hash_info.modulus for d in np.base_repr(i, 4).zfill(6))
        for i in range(3000)
    ]
    assert len({hash(k) for k in many}) == 1
    with pytest.raises(UnsafeError, match="neither text, objects nor small numbers"):
        load(pickle.dumps(dict.fromkeys(many), 4))


def test_keys_of_checkpoints_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucformat.sources.pickle.unpickler._MIN_COLLISIONS", 1000)
    monkeypatch.setattr("ucformat.sources.pickle.unpickler._COLLISIONS_PER_BYTE", 0)
    for keys in (range(20_000), map(str, range(20_000))):
        value = dict.fromkeys(keys)
        assert load(pickle.dumps(value, 2)) == value
    chunks = {
        MetadataIndex(str(i)): None for i in range(20_000)
    }  # as in the metadata of PyTorch DCP
    assert [key.get("fqn") for key in load(pickle.dumps(chunks, 2))] == [key.fqn for key in chunks]


def test_where_memory_ends_the_file_is_not_called_damaged() -> None:
    def nbytes(_key: str) -> int:
        raise MemoryError

    with pytest.raises(MemoryError):
        unpickle(pickled(tensor()), file="x.pt", storage_nbytes=nbytes)


STORAGE = [text("storage"), glob("torch", "FloatStorage"), text("0"), text("cpu"), integer(4)]


@pytest.mark.parametrize(
    "identity",
    [text("0"), b"]", tuple_of(*STORAGE[:4]), tuple_of(text("module"), *STORAGE[1:]), tuple_of()],
)
def test_what_is_no_storage_is_outside(identity: bytes) -> None:
    with pytest.raises(UnsafeError, match=r"refers to an outside object .* which is not a storage"):
        load(b"\x80\x02" + identity + b"Q.")


@pytest.mark.parametrize(
    ("at", "part"),
    [(1, text("FloatStorage")), (2, integer(0)), (4, text("4")), (4, integer(-1)), (4, b"\x88")],
)
def test_a_storage_is_named_by_its_kind_key_and_size(at: int, part: bytes) -> None:
    with pytest.raises(IntegrityError, match="refers to a storage by"):
        load(b"\x80\x02" + tuple_of(*STORAGE[:at], part, *STORAGE[at + 1 :]) + b"Q.")


def test_a_file_in_memory_that_is_filled_with_no_bytes_is_damage() -> None:
    stream = call(glob("_io", "BytesIO")) + tuple_of(text("no bytes"), integer(0), b"N") + b"b"
    with pytest.raises(IntegrityError, match="something other than bytes"):
        load(pickled(stream))


def test_a_distributed_tensor_without_its_parts_is_damage() -> None:
    kind = glob("torch.distributed.tensor", "DTensor")
    args = tuple_of(tensor(), b"N", tuple_of(integer(2), integer(2)))
    made = call(
        glob("torch._tensor", "_rebuild_from_type_v2"), glob("torch", "Tensor"), kind, args, b"}"
    )
    with pytest.raises(IntegrityError, match="without a local tensor, placements and a shape"):
        load(pickled(made), allow=(PARTS,))
