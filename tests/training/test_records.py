"""JSON Lines files after a crash, and damaged ones."""

import json

import pytest

from minitx.config import ConfigError
from minitx.training.json_lines import end_last_line, read_json_lines

RECORDS = [{"step": 1, "text": "ä𝄞"}, {"step": 2, "text": "long enough"}]
TEXT = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


@pytest.mark.parametrize("end", range(len(TEXT) + 1))
def test_a_crash_in_any_byte_costs_the_last_line_alone_and_the_next_line_is_whole(tmp_path, end):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(TEXT[:end])
    kept = RECORDS[: TEXT[: end + 1].count(b"\n")]  # a line whose end alone is missing is whole
    assert read_json_lines(path) == kept
    end_last_line(path)
    assert read_json_lines(path) == kept
    with path.open("ab") as file:
        file.write(b'{"step": 3}\n')
    assert read_json_lines(path) == [*kept, {"step": 3}]


@pytest.mark.parametrize("line", ['{"step": 1, "te', "3", "{}", "\xff"])
def test_a_whole_line_that_is_no_record_is_named_and_blank_lines_are_none(tmp_path, line):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(f"\n{line}\n".encode("latin-1") + TEXT)
    with pytest.raises(ConfigError, match=r"lines\.jsonl: line 2 is not a record of a run"):
        read_json_lines(path, ["step"])
    assert read_json_lines(tmp_path / "none.jsonl") == []
