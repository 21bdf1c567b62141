"""kvd-bench data runs, and its JSON has the documented shape. Figures are for quiet machines."""

from __future__ import annotations

from tests.tools.bench import told


def test_data_measures_every_case_beside_its_limit() -> None:
    result = told("data", "--quick", "--rounds", "1")
    assert set(result) == {
        "cases", "daemon_cpu_pct_at_1gbps", "daemon_cpu_pct_sealing", "digest_alone_pct",
    }  # fmt: skip
    assert 0 < result["digest_alone_pct"] < 500
    assert result["daemon_cpu_pct_at_1gbps"] >= 0
    assert result["daemon_cpu_pct_sealing"] >= 0
    seen = set()
    for case in result["cases"]:
        assert set(case) == {
            "chunk_bytes", "chunks", "layout", "mode", "limit_gbps", "store_gbps", "load_gbps",
            "store_ratio", "load_ratio", "cpu_s_per_gb",
        }  # fmt: skip
        assert all(
            case[name] > 0
            for name in ("limit_gbps", "store_gbps", "load_gbps", "store_ratio", "load_ratio",
                         "cpu_s_per_gb")
        )  # fmt: skip
        seen.add((case["chunk_bytes"], case["chunks"], case["layout"], case["mode"]))
    assert seen == {
        (size, count, layout, mode)
        for size, count in ((2 << 20, 16), (32 << 20, 4))
        for layout, mode in (
            ("contiguous", "streamed"), ("contiguous", "awaited"), ("contiguous", "verified"),
            ("paged", "streamed"),
        )
    }  # fmt: skip
