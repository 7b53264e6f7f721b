"""The kernels' section shows what the record holds, whoever was measured."""

from bench.kernels.page import section

ROW = {"shape": "T 1", "flops_per_byte": 1.5, "bound": "memory", "time_us": 12.34, "share_of_ceiling": 0.5}
CEILINGS = {
    "device": "cpu",
    "threads": 2,
    "read_gb_s": 40.0,
    "copy_gb_s": 30.0,
    "bf16_tflop_s": 1.0,
    "f32_tflop_s": 0.2,
}


def test_implementations_stand_side_by_side():
    rows = [{**ROW, "kernel": "decode", "by": "cpu"}, {**ROW, "kernel": "decode", "by": "reference", "time_us": 99.0}]
    page = "\n".join(section({"ceilings": CEILINGS, "measurements": rows}))
    assert "| kernel | shape | flop/byte | bound | cpu | reference |" in page
    assert "| decode | T 1 | 1.5 | memory | 12.3 (50%) | 99.0 (50%) |" in page
    assert "2 threads" in page
    assert "Prefill" not in page


def test_what_was_not_measured_by_one_is_a_dash():
    rows = [{**ROW, "kernel": "qkv", "by": "cpu"}, {**ROW, "kernel": "lm_head", "by": "reference"}]
    page = "\n".join(section({"ceilings": CEILINGS, "measurements": rows}))
    assert "| qkv | T 1 | 1.5 | memory | 12.3 (50%) | – |" in page


def test_a_gpu_has_steps_gaps_and_aims():
    extra = {"gpu": "Some GPU", "aims": [{"name": "a", "found": 0.61234, "is_met": True}], "failures": []}
    page = "\n".join(section({"ceilings": {**CEILINGS, "threads": 0}, "measurements": [], **extra}))
    assert "## Kernels on Some GPU" in page
    assert "| a | 0.6123 | True |" in page
