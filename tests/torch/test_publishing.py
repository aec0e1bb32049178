"""Publishing versions of a model: whoever follows them has exactly one of them, whole, at any time."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
import ucformat.torch
from tests.tiers import rounds
from tests.torch.publishing_program import weights
from tests.torch.ranks import KILLED, Ranks
from ucformat.errors import ChecksumError, Conflict, StateMismatch, UcformatError, UsageError
from ucformat.format.patched import read_boxes
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Piece
from ucformat.reading.execute import ReadOptions
from ucformat.schema import MANIFEST
from ucformat.torch import Increments, Publisher, publish, subscribe
from ucformat.torch.comm.group import single_process_group
from ucformat.torch.loading.match import Matched
from ucformat.torch.publishing.patches import CurrentVersion, PatchFill
from ucformat.torch.saving import patching
from ucformat.torch.state.local import LocalShard

if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3 import Bucket

PROGRAM = Ranks("tests.torch.publishing_program")
PATCHES = Increments(patch=True, max_chain=3)


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}


def is_version(state: dict[str, torch.Tensor], version: int) -> bool:
    return all(torch.equal(state[name], tensor) for name, tensor in weights(version).items())


@pytest.mark.parametrize("store", ["folder", "s3"])
@pytest.mark.parametrize(("versions", "lives"), [(8, 1), (200, 12)])
@pytest.mark.front("8-1-folder")
def test_receivers_that_are_killed_never_have_a_wrong_version(
    versions: int, lives: int, store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Two ranks train, and two others receive columns of what these have rows of, and compare them."""
    channel = str(tmp_path / "channel")
    if store == "s3":
        bucket: Bucket = request.getfixturevalue("bucket")
        channel = bucket.place()
    trained: list[Any] = []
    trainer = threading.Thread(
        target=lambda: trained.extend(
            PROGRAM.run("train", 2, tmp_path / "train", channel=channel, versions=versions)
        )
    )
    trainer.start()
    chance = random.Random(versions)
    for life in range(lives):
        seconds = 0.3 + 2 * chance.random()
        folder = tmp_path / f"life-{life}"
        killed = PROGRAM.run("receive", 2, folder, channel=channel, last=None, seconds=seconds)
        assert killed == [KILLED, KILLED]
    followed = PROGRAM.run("receive", 2, tmp_path / "last", channel=channel, last=versions)
    trainer.join()
    for seen in followed:
        assert seen[0][1] == "first"
        assert [v for v, _ in seen] == sorted({v for v, _ in seen})
    assert trained[0][:2] == [None, 1]
    assert None in trained[0][1:]


def test_an_update_reads_the_patches_of_what_a_rank_has(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, increments=PATCHES)
    subscription, state = subscribe(tmp_path), empty()
    assert subscription.update(state) is None
    assert subscription.wait(0.01) is None
    assert subscription.version is None
    whole: list[int] = []
    patched: list[int] = []
    amounts: list[int] = []
    for version in range(1, 8):
        published = publisher.publish(weights(version))
        assert published.version == version
        assert published.base == (None if version in (1, 5) else version - 1)
        if version == 3:
            continue
        assert subscription.wait() == version
        update = subscription.update(state)
        assert update is not None
        assert (update.version, update.id) == (version, published.id)
        assert is_version(state, version)
        assert subscription.update(state) is None
        (whole if update.whole else patched).append(version)
        amounts.append(update.nbytes)
    assert (whole, patched) == ([1], [2, 4, 5, 6, 7])
    first, second, fourth, fifth, *_ = amounts
    assert second < fourth < 0.5 * first  # one patch; two patches
    assert fifth < first  # what is equal is not read, although all of it is stored anew


def test_a_patch_is_made_of_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the base is read, but after a failure; and what was kept is that of the base alone."""
    publisher, other = (Publisher(tmp_path, increments=Increments(patch=True)) for _ in range(2))
    read: list[bool] = []

    def read_and_noted(*arguments: Any) -> None:
        read.append(True)
        read_boxes(*arguments)

    monkeypatch.setattr(patching, "read_boxes", read_and_noted)
    subscription, state = subscribe(tmp_path), empty()
    reads = []
    for version in range(1, 9):
        read.clear()
        if version == 5:
            with monkeypatch.context() as failing:
                failing.setattr(publisher._channel, "announce", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    publisher.publish(weights(40))
            read.clear()
        (other if version == 7 else publisher).publish(weights(version))
        reads.append(bool(read))
        update = subscription.update(state)
        assert update is not None
        assert is_version(state, version), version
    assert reads == [False, True, False, False, True, False, True, True]


def test_a_model_is_received_into_its_parameters(tmp_path: Path) -> None:
    model, other = (torch.nn.Linear(7, 5) for _ in range(2))
    subscription = subscribe(tmp_path)
    for version in (1, 2):
        publish(model, tmp_path)
        update = subscription.update(dict(other.named_parameters()))
        assert update is not None
        assert update.version == version
        assert all(
            torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
        )
        assert bool(update.whole) == (version == 1)
        torch.nn.init.ones_(model.weight)


def test_all_that_can_be_in_a_state(tmp_path: Path) -> None:
    """Elements of all sizes, scalars, empty and strided tensors, tied ones, and values."""
    generator = torch.Generator().manual_seed(1)

    def model(version: int) -> dict[str, Any]:
        bits = torch.randint(-100, 100, (40, 700), generator=generator, dtype=torch.int64)
        sparse = torch.arange(28_000.0).view(40, 700)
        sparse[version % 40, :50] = -version
        tied = bits.half()
        return {
            "bits": bits,
            "bool": bits[:, ::2] > 0,
            "complex": torch.complex(sparse.double(), bits.double()),
            "float8": bits.to(torch.float8_e4m3fn),
            "sparse": sparse.t().contiguous().t(),
            "strided": sparse[:, ::3],
            "scalar": torch.tensor(version, dtype=torch.uint8),
            "empty": torch.zeros(0, 4),
            "tied": tied,
            "also tied": tied,
            "version": version,
        }

    subscription, state = subscribe(tmp_path), model(99)
    for version in range(5):
        published = model(version)
        publish({"model": published}, tmp_path, increments=PATCHES)
        update = subscription.update({"model": state})
        assert update is not None
        assert update.whole == ("" if version else "first")
        for name, value in published.items():
            same = value == state[name]
            if isinstance(value, torch.Tensor):
                words = [t.contiguous().reshape(-1).view(torch.uint8) for t in (value, state[name])]
                same = torch.equal(*words)
            assert same, (version, name)


def test_what_is_no_longer_the_version_is_loaded_whole(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, increments=PATCHES)
    subscription, state = subscribe(tmp_path), empty()
    for version in range(1, 4):
        publisher.publish(weights(version))
        update = subscription.update(state)
        assert update is not None
        assert ("weight (weight) on rank 0" in update.whole) == (version == 3)
        assert is_version(state, version)
        if version == 2:
            state["weight"][5, 5] += 1


def damage(version: Path) -> None:
    for file in (version / "data").rglob("*.bin"):
        data = bytearray(file.read_bytes())
        data[9] ^= 1
        file.write_bytes(data)


def test_a_damaged_patch_leaves_the_version_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(tmp_path, increments=PATCHES)
    subscription, state = subscribe(tmp_path), empty()
    publisher.publish(weights(1))
    subscription.update(state)
    publisher.publish(weights(2))
    damage(tmp_path / "v-00000002")
    with pytest.raises(ChecksumError, match="is damaged"):
        subscription.update(state)
    assert subscription.version == 1
    assert is_version(state, 1)
    assert publish(weights(3), tmp_path, increments=PATCHES).base is None  # which reads its base
    assert "version 3 of" in caplog.text
    assert "its base, cannot be read: " in caplog.text
    update = subscription.update(state)
    assert update is not None
    assert not update.whole
    assert is_version(state, 3)


def test_it_is_told_that_a_state_is_not_to_be_used(tmp_path: Path) -> None:
    """A patch of what is no longer the version, and then the whole cannot be read."""
    publisher = Publisher(tmp_path, increments=PATCHES)
    subscription, state = subscribe(tmp_path), empty()
    publisher.publish(weights(1))
    subscription.update(state)
    publisher.publish(weights(2))
    damage(tmp_path / "v-00000001")
    state["weight"] += 1
    with pytest.raises(UcformatError, match=r"the state is not to be used.*is damaged"):
        subscription.update(state)
    assert subscription.version is None
    publish(weights(3), tmp_path, increments=None)
    update = subscription.update(state)
    assert update is not None
    assert (update.version, update.whole) == (3, "first")
    assert is_version(state, 3)


def test_a_version_is_removed_while_it_is_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is received instead."""
    publisher = Publisher(tmp_path, increments=None, keep=1)
    subscription, state = subscribe(tmp_path), empty()
    publisher.publish(weights(1))
    subscription.update(state)
    publisher.publish(weights(2))
    newest = subscription._channel.newest

    def then_removed() -> Any:
        found = newest()
        monkeypatch.undo()
        publisher.publish(weights(3))
        return found

    monkeypatch.setattr(subscription._channel, "newest", then_removed)
    update = subscription.update(state)
    assert update is not None
    assert update.version == 3
    assert is_version(state, 3)
    assert sorted(path.name for path in tmp_path.glob("v-*")) == ["v-00000003"]


def test_a_publisher_has_to_be_the_only_one(tmp_path: Path) -> None:
    first, second = Publisher(tmp_path), Publisher(tmp_path)
    assert first.publish(weights(1), version=5).version == 5
    with pytest.raises(Conflict, match="version 5 is not later than version 5"):
        second.publish(weights(1), version=5)
    announce = first._channel.announce

    def late(*document: Any) -> None:
        assert second.publish(weights(2)).url.endswith("/v-00000006.1")
        announce(*document)

    first._channel.announce = late  # type: ignore[method-assign,assignment]
    with pytest.raises(Conflict, match="another publisher has published"):
        first.publish(weights(3))
    first._channel.announce = announce  # type: ignore[method-assign]
    assert sorted(path.name for path in tmp_path.glob("v-*")) == ["v-00000005", "v-00000006.1"]
    state = empty()
    update = subscribe(tmp_path).update(state)
    assert update is not None
    assert is_version(state, 2)
    published = first.publish(weights(7))
    assert (published.version, published.base) == (7, 6)


def test_a_publisher_goes_on_where_another_one_ended(tmp_path: Path) -> None:
    """Also after one that was killed before it told of its version."""
    subscription, state = subscribe(tmp_path), empty()
    publish(weights(1), tmp_path, increments=PATCHES)
    subscription.update(state)
    killed = Publisher(tmp_path, increments=PATCHES)
    killed._channel.announce = lambda *_: 1 / 0  # type: ignore[assignment,method-assign]
    with pytest.raises(ZeroDivisionError):
        killed.publish(weights(9))
    assert (tmp_path / "v-00000002" / MANIFEST).exists()
    assert subscription.update(state) is None
    publisher = Publisher(tmp_path, increments=PATCHES, keep=1)
    published = publisher.publish(weights(2))
    assert (published.base, published.url) == (1, str(tmp_path / "v-00000002.1"))
    update = subscription.update(state)
    assert update is not None
    assert not update.whole
    assert is_version(state, 2)
    # that of the killed one is gone, and what the newest is based on is not
    assert sorted(path.name for path in tmp_path.glob("v-*")) == ["v-00000001", "v-00000002.1"]
    assert [publisher.publish(weights(v)).base for v in range(3, 7)] == [2, 3, None, 5]
    assert sorted(path.name for path in tmp_path.glob("v-*")) == ["v-00000005", "v-00000006"]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="base is not an argument of Publisher"):
        Publisher(tmp_path, base=True)
    with pytest.raises(UsageError, match="keep must be at least 1"):
        publish(weights(1), tmp_path, keep=0)
    with pytest.raises(UsageError, match="not possible with form"):
        Publisher(tmp_path, form="safetensors")
    (tmp_path / "channel.json").write_text("{}")
    with pytest.raises(UcformatError, match="not the document of a channel"):
        subscribe(tmp_path).update(empty())


def test_a_place_that_has_become_another_checkpoint_is_refused(tmp_path: Path) -> None:
    publish(weights(1), tmp_path)
    ucformat.torch.save({"model": weights(2)}, tmp_path / "v-00000001", overwrite=True)
    state = empty()
    with pytest.raises(Conflict, match=r"is not the checkpoint .* published as version 1"):
        subscribe(tmp_path).update(state)
    assert all(not tensor.any() for tensor in state.values())


def test_any_box_of_any_memory(tmp_path: Path) -> None:
    """Four versions at once, in tensors that have parts of these, in any order of strides."""
    publisher = Publisher(tmp_path, increments=Increments(patch=True))
    places = [publisher.publish(weights(version)).url for version in (1, 2, 3, 4)]
    first, last = ucformat.open(places[0]), ucformat.open(places[-1])
    current = CurrentVersion(1, first.id, first.metadata.fingerprints, frozenset())
    ranks, chance = single_process_group(), random.Random(5)
    before, after = weights(1), weights(4)
    begun: list[bool] = []
    fill = PatchFill(current, ranks, lambda: begun.append(True))
    for turn in range(rounds(25, 500)):
        matched, expected = [], []
        for key, info in last.tensors.items():
            start = tuple(chance.randrange(n) for n in info.shape)
            shape = tuple(chance.randint(1, n - a) for n, a in zip(info.shape, start, strict=True))
            index = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
            order = chance.sample(range(len(shape)), len(shape))
            memory = torch.empty([shape[d] for d in order], dtype=before[key.name].dtype)
            tensor = memory.permute([order.index(d) for d in range(len(shape))])
            tensor.copy_(before[key.name][index])
            piece = Piece(Box(start, shape), 0, tensor.stride())
            matched.append(Matched(LocalShard(info, (piece,), tensor), info))
            expected.append(after[key.name][index])
        assert fill(last, matched, ranks, None, ReadOptions()).nbytes < 200_000
        assert len(begun) == turn + 1
        for m, tensor in zip(matched, expected, strict=True):
            assert torch.equal(m.target.tensor, tensor), m.target


def test_what_a_receiver_has_no_place_for_is_refused_before_anything_is_changed(
    tmp_path: Path,
) -> None:
    publisher, state = Publisher(tmp_path), {"weight": torch.zeros(3)}
    subscription = subscribe(tmp_path)
    publisher.publish({"weight": torch.ones(3)})
    subscription.update(state)
    publisher.publish({"weight": torch.ones(3) + 1, "new": torch.ones(2), "value": 1})
    with pytest.raises(StateMismatch, match="nothing was changed") as error:
        subscription.update(state)
    assert "new (weight)" in error.value.message
    assert str(error.value.hint).endswith("; leave= names what has no place in the state")
    assert subscription.version == 1
    assert torch.equal(state["weight"], torch.ones(3))
    follower = subscribe(tmp_path, leave=["new", "value"])
    follower.update(state)
    assert torch.equal(state["weight"], torch.ones(3) + 1)
