"""units: a table of what people write, and every formatter's text read back."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.core import units
from clustersim.core.errors import UnitError, nearest

READ = [
    (units.parse_bandwidth, "400 Gb/s", 50e9),
    (units.parse_bandwidth, "400Gb/s", 50e9),
    (units.parse_bandwidth, "400Gbps", 50e9),
    (units.parse_bandwidth, "400 Gbit/s", 50e9),
    (units.parse_bandwidth, "50 GB/s", 50e9),
    (units.parse_bandwidth, "50 GBps", 50e9),
    (units.parse_bandwidth, "50e9 B/s", 50e9),
    (units.parse_bandwidth, "1 GiB/s", 2.0**30),
    (units.parse_bandwidth, "1.6 TB/s", 1.6e12),
    (units.parse_bandwidth, ".5 GB/s", 0.5e9),
    (units.parse_bandwidth, "5. GB/s", 5e9),
    (units.parse_bandwidth, "1_600 Gb/s", 200e9),
    (units.parse_bytes, "80 GB", 80e9),
    (units.parse_bytes, "80 GiB", 80 * 2.0**30),
    (units.parse_bytes, "25 MiB", 25 * 2.0**20),
    (units.parse_bytes, "1 kiB", 1024.0),
    (units.parse_bytes, "8 bits", 1.0),
    (units.parse_bytes, "8 bytes", 8.0),
    (units.parse_bytes, "0 B", 0.0),
    (units.parse_time, "500 ns", 5e-7),
    (units.parse_time, "3.4 us", 3.4e-6),
    (units.parse_time, "3.4 \N{MICRO SIGN}s", 3.4e-6),
    (units.parse_time, "3.4 \N{GREEK SMALL LETTER MU}s", 3.4e-6),
    (units.parse_time, "2 min", 120.0),
    (units.parse_time, "1.5h", 5400.0),
    (units.parse_time, "0 s", 0.0),
    (units.parse_flops, "989 TFLOP/s", 989e12),
    (units.parse_flops, "989 TFLOPS", 989e12),
    (units.parse_flops, "15.7 TFLOPs", 15.7e12),
    (units.parse_flops, "1 PFLOP/s", 1e15),
    (units.parse_message_size, "8", 8),
    (units.parse_message_size, "1K", 1024),
    (units.parse_message_size, "1k", 1024),
    (units.parse_message_size, "128M", 128 * 2**20),
    (units.parse_message_size, "128MB", 128 * 2**20),
    (units.parse_message_size, "1GiB", 2**30),
    (units.parse_message_size, "1.5 GiB", 3 * 2**29),
    (units.parse_message_size, "4096 B", 4096),
]

REFUSED = [
    (units.parse_bandwidth, 400, "bare number"),
    (units.parse_bandwidth, 4e10, "bare number"),
    (units.parse_bandwidth, "400", "'400 Gb/s' or '50 GB/s'"),
    (units.parse_bandwidth, "400 Gigs", "cannot read '400 Gigs' as a bandwidth"),
    (units.parse_bandwidth, "400 gb/s", "cannot read"),
    (units.parse_bandwidth, "e5 GB/s", "cannot read"),
    (units.parse_bandwidth, "+ GB/s", "cannot read"),
    (units.parse_bandwidth, "- GB/s", "cannot read"),
    (units.parse_bandwidth, " GB/s", "cannot read"),
    (units.parse_bandwidth, "0 GB/s", "above zero"),
    (units.parse_bandwidth, "-4 GB/s", "above zero"),
    (units.parse_bandwidth, "1e999 GB/s", "above zero"),
    (units.parse_bandwidth, "400 GB", "cannot read"),
    (units.parse_bandwidth, None, "cannot read None"),
    (units.parse_bandwidth, [1], "cannot read"),
    (units.parse_bytes, 80, "bare number"),
    (units.parse_bytes, "80", "'80 GB' or '25 MiB'"),
    (units.parse_bytes, "-1 B", "at least zero"),
    (units.parse_time, 3, "bare number"),
    (units.parse_time, "3", "'500 ns'"),
    (units.parse_time, "3 sec", "cannot read"),
    (units.parse_flops, 3e12, "bare number"),
    (units.parse_flops, "3 TB/s", "compute rate"),
    (units.parse_message_size, "", "message size"),
    (units.parse_message_size, "1e+300", "at most 1 EiB"),
    (units.parse_message_size, "G", "message size"),
    (units.parse_message_size, "0", "above zero"),
    (units.parse_message_size, "0.3", "whole number of bytes"),
    (units.parse_message_size, "1 Gb", "message size"),
]


@pytest.mark.parametrize(("parse", "text", "value"), READ)
def test_what_people_write_is_read_as_they_mean_it(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(("parse", "text", "part"), REFUSED)
def test_what_is_not_the_quantity_is_refused_with_what_would_be_right(parse, text, part):
    with pytest.raises(UnitError) as refused:
        parse(text)
    assert part in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_bit_and_a_byte_differ_by_eight():
    assert units.parse_bandwidth("400 GB/s") == 8 * units.parse_bandwidth("400 Gb/s")


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_a_unit_error(text):
    for parse in (
        units.parse_bandwidth,
        units.parse_bytes,
        units.parse_time,
        units.parse_flops,
        units.parse_message_size,
    ):
        with contextlib.suppress(UnitError):
            assert parse(text) >= 0


@given(st.from_regex(r"[+-]?[0-9_]{0,3}\.?[0-9]{0,2}(e[+-]?[0-9]{0,2})? ?([kKMGT]i?)?(B|b)?(/s)?", fullmatch=True))
def test_near_misses_never_raise_anything_but_a_unit_error(text):
    for parse in (units.parse_bandwidth, units.parse_bytes, units.parse_message_size):
        with contextlib.suppress(UnitError):
            assert parse(text) >= 0


positive = st.floats(min_value=1e-9, max_value=1e18)


@given(positive)
def test_a_formatted_size_reads_back_to_its_four_digits(value):
    assert units.parse_bytes(units.format_bytes(value)) == pytest.approx(value, rel=6e-4)


@given(st.floats(min_value=1e-12, max_value=1e9))
def test_a_formatted_time_reads_back_to_its_four_digits(value):
    assert units.parse_time(units.format_time(value)) == pytest.approx(value, rel=6e-4)


@given(positive)
def test_a_formatted_bandwidth_reads_back_to_its_four_digits(value):
    assert units.parse_bandwidth(units.format_bandwidth(value)) == pytest.approx(value, rel=6e-4)


@given(st.integers(1, 10**6), st.sampled_from(["ns", "us", "ms", "s"]))
def test_a_whole_time_is_the_float_nearest_to_it(number, unit):
    exponent = {"ns": 9, "us": 6, "ms": 3, "s": 0}[unit]
    assert units.parse_time(f"{number} {unit}") == number / 10**exponent


@given(st.integers(1, 10**6), st.sampled_from(["", "K", "M", "G", "KiB", "MiB", "GiB"]))
def test_a_message_size_is_binary_and_whole(number, suffix):
    power = {"": 0, "K": 10, "M": 20, "G": 30}[suffix[:1]]
    assert units.parse_message_size(f"{number}{suffix}") == number * 2**power


def test_zero_is_written_in_the_base_unit():
    assert (units.format_time(0.0), units.format_bytes(0.0)) == ("0 s", "0 B")


def test_a_large_bandwidth_is_written_out():
    assert units.format_bandwidth(409.6e12) == "409600 GB/s"


def test_the_nearest_name_does_not_mind_capitals():
    assert nearest("HGX-H100", ["hgx-h100", "dgx-1v"]) == "did you mean 'hgx-h100'?"
