"""Untrusted JSON is parsed in bounded memory, or refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatrain.storage.untrusted_json import parse_json


@pytest.mark.parametrize("unit", ["{},", "[[]],", "1,"])
def test_dense_json_is_refused_before_it_is_parsed(unit: str) -> None:
    code = (
        "import sys\n"
        "from megatrain.storage.untrusted_json import InvalidError, parse_json\n"
        "text = b'[' + sys.argv[1].encode() * (100_000_000 // len(sys.argv[1])) + b'0]'\n"
        "try: parse_json(text, max_bytes=1 << 30)\n"
        "except InvalidError as error: print(error)\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, unit], check=True, capture_output=True, text=True)
    reason, kilobytes = ended.stdout.splitlines()
    assert "values in" in reason
    assert int(kilobytes) < 400_000


@pytest.mark.parametrize(
    "text", [b'"\xed\xa0\x80"', b'"\\ud800"', b'"\\ud83d\\ud83d"', b"\xff", b"[1,", b"", b'"\\uDFFF"']
)
def test_what_is_no_json_in_ascii_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text, max_bytes=100)
