"""Values of a tagged call, while its text grows by single characters."""

import pytest

from exo_node.shard.text.call_scanners import Part, scanner_for

CALLS = {
    "qwen3_coder": (
        "<function=write>\n<parameter=path>\n{}\n</parameter>\n"
        "<parameter=lines>\n3\n</parameter>\n</function>"
    ),
    "glm47": (
        "write\n<arg_key>path</arg_key>\n<arg_value>{}</arg_value>\n"
        "<arg_key>lines</arg_key>\n<arg_value>3</arg_value>\n"
    ),
}


@pytest.mark.parametrize("call_format", CALLS)
@pytest.mark.parametrize("value", ["a.py", "a\n", "\n\na", "a </", "a\n</para", ""])
def test_parts_of_a_value_hold_nothing_of_the_tags_around_it(call_format: str, value: str) -> None:
    scanner = scanner_for(call_format, "")
    assert scanner is not None
    text = CALLS[call_format].format(value)
    scans = [scan for character in text for scan in scanner.feed(character)]
    scans += scanner.finish()
    assert "".join(scan.text for scan in scans if isinstance(scan, Part)) == value + "3"
    assert (scanner.tool, scanner.is_complete) == ("write", True)
