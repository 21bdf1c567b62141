"""Device memory keeps the contract: on CPU tensors everywhere, on a device where there is one."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from conformance import Conformance, Medium
from tiers_kit import CONFIG, Chunk, Rig

from kvd.errors import ConfigError
from kvd.tiers.backend import Backend, Refused
from kvd.tiers.base import Answer, Place
from kvd.tiers.borrowing import Borrowed
from kvd.tiers.hbm import HbmBackend, HbmConfig

torch = pytest.importorskip("torch")
MIB = 1 << 20
NO_DEVICE = not torch.cuda.is_available()


class OnTensors:
    limit = 8 * MIB

    def __init__(self, device: str) -> None:
        self.device = device

    def backend(self) -> Backend:
        return HbmBackend(HbmConfig(self.device, self.limit, epoch=7))


class TestCpuTensors(Conformance):
    """The conformance suite: K26 (device copies that fail), K43."""

    @pytest.fixture
    def medium(self) -> Medium:
        return OnTensors("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(NO_DEVICE, reason="needs a CUDA device")
class TestDevice(Conformance):
    @pytest.fixture
    def medium(self) -> Medium:
        return OnTensors("cuda:0")


@pytest.mark.parametrize(
    ("device", "says"),
    [("cuda:99", "CUDA device|not there"), ("abacus", "give cuda:N"), ("meta", "give cuda:N")],
)
def test_a_device_that_is_not_there_is_refused_by_name(device: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"tier hbm: .*({says})"):
        HbmBackend(HbmConfig(device, 8 * MIB)).open()


def test_without_torch_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvd.tiers.hbm import HbmBackend, HbmConfig\n"
        "from kvd.errors import ConfigError\n"
        "try: HbmBackend(HbmConfig('cpu', 1 << 23)).open()\n"
        "except ConfigError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'kvd[gpu]'" in done.stdout


def test_nothing_is_lent_without_a_device() -> None:
    backend = HbmBackend(HbmConfig("cpu", 8 * MIB))
    backend.open()
    with pytest.raises(Refused, match="only CUDA memory can be lent"):
        backend.lend("engine", Place(0, 1))
    backend.close()


def test_a_lent_slot_waits_for_whoever_has_it() -> None:
    """The ledger of loans, by hand: deleted, it is a miss at once, and used again only after."""
    backend = HbmBackend(HbmConfig("cpu", MIB, slab_bytes=MIB))
    it = Rig(backend, "hbm", CONFIG).start()
    chunk, other = Chunk(1, MIB), Chunk(2, MIB)
    place = it.one(chunk.write()).place
    at = (place.at >> 32, place.at & 0xFFFFFFFF)
    backend._lent[at] = Counter({"engine": 2})
    assert it.one(chunk.delete(place)).answer is Answer.OK
    assert it.one(chunk.read(place)).answer is Answer.MISS
    assert it.one(other.write()).answer is Answer.NO_SPACE
    assert it.tier.stat().notes["waiting_for_borrowers"] == 1
    assert backend.take_back("nobody") == 0
    assert backend.take_back("engine", place) == 1
    assert it.one(other.write()).answer is Answer.NO_SPACE
    assert backend.take_back("engine") == 1
    assert it.one(other.write()).answer is Answer.OK
    it.close()


# -- with a device ------------------------------------------------------------------------------

BORROWER = """
import sys
from kvd.tiers.base import Place
from kvd.tiers.borrowing import Borrowed, Export
import msgpack, hashlib
fields = msgpack.unpackb(sys.stdin.buffer.read())
export = Export(*fields[:-1], Place(*fields[-1]))
it = Borrowed()
print(hashlib.sha256(it.tensor(export, 7).cpu().numpy().tobytes()).hexdigest(), flush=True)
it.close()
"""


@pytest.fixture
def device() -> Iterator[Rig]:
    it = Rig(HbmBackend(HbmConfig("cuda:0", 64 * MIB, epoch=7)), "hbm", CONFIG).start()
    yield it
    it.close()


@pytest.mark.gpu
@pytest.mark.skipif(NO_DEVICE, reason="needs a CUDA device")
def test_another_process_reads_what_is_lent(device: Rig) -> None:
    import hashlib

    import msgpack

    chunk = Chunk(1, 300_000)
    place = device.one(chunk.write()).place
    backend = device.tier.backend.below  # type: ignore[attr-defined]
    export = backend.lend("engine", place)
    done = subprocess.run(
        [sys.executable, "-c", BORROWER],
        input=msgpack.packb([*export[:-1], list(export.place)]),
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.decode().strip() == hashlib.sha256(chunk.memory).hexdigest()
    with pytest.raises(ConfigError, match="epoch"):
        Borrowed().tensor(export, 8)
    assert backend.take_back("engine") == 1
