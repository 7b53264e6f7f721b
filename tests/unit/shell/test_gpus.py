from pathlib import Path

import pytest

from shell import gpus as module
from shell.gpus import DeviceShare, find_gpus, parse_listing, plan_devices, select
from tandem.errors import ConfigError

A, B, C = "GPU-aa-1", "GPU-ab-2", "GPU-c0-3"
LISTING = f"""GPU 0: NVIDIA H200 (UUID: {A})
GPU 1: NVIDIA H200 (UUID: {B})
  MIG 3g.71gb     Device  0: (UUID: MIG-1)
  MIG 3g.71gb     Device  1: (UUID: MIG-2)
GPU 2: NVIDIA H200 (UUID: {C})
"""


def owned(shares: tuple[DeviceShare, ...]) -> list[tuple[str, int]]:
    """Each worker's own device, and how many are on it."""
    return [(share.gpus[0] if share.gpus else share.device, share.num_workers) for share in shares]


@pytest.mark.parametrize(
    ("gpus", "counts", "prefill", "decode"),
    [
        ((), (1, 1), [("auto", 1)], [("auto", 1)]),
        ((A,), (1, 1), [(A, 2)], [(A, 2)]),
        ((A,), (2, 2), [(A, 4)] * 2, [(A, 4)] * 2),
        ((A, B), (1, 1), [(A, 1)], [(B, 1)]),
        ((A, B), (2, 2), [(A, 2)] * 2, [(B, 2)] * 2),
        ((A, B), (1, 3), [(A, 2)], [(A, 2), (B, 2), (B, 2)]),
        ((A, B, C), (2, 1), [(A, 1), (B, 1)], [(C, 1)]),
        ((A, B, C), (1, 1), [(A, 1)], [(B, 1)]),
        ((A, B, C), (0, 2), [], [(A, 1), (B, 1)]),
        ((A, B, C), (2, 5), [(A, 3)] * 2, [(A, 3), (B, 2), (B, 2), (C, 2), (C, 2)]),
    ],
)
def test_gpus_are_shared_out_evenly(gpus, counts, prefill, decode):
    plan = plan_devices(gpus, *counts)
    assert (owned(plan.prefill), owned(plan.decode)) == (prefill, decode)


@pytest.mark.parametrize("num_gpus", range(1, 9))
@pytest.mark.parametrize("counts", [(0, 1), (1, 1), (2, 1), (3, 4), (8, 8)])
def test_no_gpu_has_two_workers_more_than_another_and_every_worker_knows_how_many_share(num_gpus, counts):
    gpus = [f"GPU-{number}" for number in range(num_gpus)]
    plan = plan_devices(gpus, *counts)
    names = [gpu for gpu, _ in owned((*plan.prefill, *plan.decode))]
    on_each = [names.count(gpu) for gpu in gpus]
    assert max(on_each) - min(on_each) <= 1
    assert all(num_workers == names.count(gpu) for gpu, num_workers in owned((*plan.prefill, *plan.decode)))


@pytest.mark.parametrize(
    ("devices", "prefill", "decode"),
    [
        (["cuda:2"], [(C, 4)] * 2, [(C, 4)] * 2),
        (["cuda:0", "cuda:1"], [(A, 2), (B, 2)], [(A, 2), (B, 2)]),  # fewer than the workers: dealt round
        (["cuda:0", "cuda:1", "cuda:1", B], [(A, 1), (B, 3)], [(B, 3)] * 2),
        (["cpu", "cpu", A, B], [("cpu", 1)] * 2, [(A, 1), (B, 1)]),
        ([A, B, "GPU-c", "GPU-c"], [(A, 1), (B, 1)], [(C, 2)] * 2),  # by the beginning of a UUID
    ],
)
def test_a_list_of_devices_is_dealt_round_prefill_workers_first(devices, prefill, decode):
    plan = plan_devices((A, B, C), 2, 2, devices)
    assert (owned(plan.prefill), owned(plan.decode)) == (prefill, decode)


def test_a_worker_sees_its_own_gpu_first_and_the_others_behind_it():
    (share,) = plan_devices((A, B, C), 0, 1, ["cuda:1"]).decode
    assert share == DeviceShare("cuda:0", (B, A, C), 1)


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        ("cuda:3", (A, B, C), r"--device: cuda:3 is not here; GPUs are GPU-aa-1, GPU-ab-2, GPU-c0-3"),
        ("GPU-a", (A, B, C), r"--device: GPU-a is not here"),
        ("cuda:0", (), r"--device: cuda:0 is not here; GPUs are none"),
    ],
)
def test_a_device_that_is_not_here_or_not_one_is_named(device, gpus, message):
    with pytest.raises(ConfigError, match=message):
        plan_devices(gpus, 1, 1, [device])


def test_more_devices_than_workers_are_refused():
    with pytest.raises(ConfigError, match="--device: names 3 devices for 2 workers"):
        plan_devices((A, B), 1, 1, ["cuda:0", "cuda:1", "cpu"])


def test_slices_of_a_divided_gpu_stand_for_it():
    assert parse_listing(LISTING) == (A, "MIG-1", "MIG-2", C)
    assert parse_listing("NVIDIA-SMI has failed\n") == ()


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("2,0", (C, A)), ("GPU-c,GPU-aa", (C, A)), ("0,7,1", (A,)), ("-1", ()), ("", ()), (" 1 ", (B,)), ("GPU-a,0", ())],
)
def test_gpus_that_cuda_hides_are_not_shared_out(visible, seen):
    assert select((A, B, C), visible) == seen


@pytest.mark.parametrize(
    ("listing", "visible", "found"),
    [("", None, ("0", "1")), ("", "1", ("1",)), (f"GPU 0: H200 (UUID: {A})\n", None, (A,))],
)
def test_without_a_listing_gpus_are_known_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing, visible, found
):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr(module, "_listing", lambda: listing)
    assert find_gpus(visible, tmp_path) == found


def test_no_tool_is_asked_where_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_listing", lambda: pytest.fail("asked"))
    assert find_gpus(None, tmp_path) == ()
