"""What the page changes, and what a variable fixes."""

import pytest

from exo_node.node.machine.settings import Settings
from exo_node.node.machine.switches import Switches
from exo_node.placement.errors import InvalidRequest


def test_the_page_chooses_when_the_machine_stays_awake() -> None:
    switches = Switches.of(Settings())
    assert switches.keep_awake == "answers"
    assert switches.describe()["keep_awake"]["source"] == "default"
    switches.change({"keep_awake": "always"})
    assert switches.keep_awake == "always"
    described = switches.describe()["keep_awake"]
    assert described == {"value": "always", "source": "runtime", "writable": True, "reason": ""}


def test_a_variable_fixes_it_and_is_named_with_its_own_value() -> None:
    switches = Switches.of(Settings(keep_awake="never"))
    with pytest.raises(InvalidRequest, match="EXO_KEEP_AWAKE=never") as caught:
        switches.change({"keep_awake": "always"})
    assert caught.value.param == "keep_awake" and switches.keep_awake == "never"
    assert switches.describe()["keep_awake"]["reason"] == "fixed by EXO_KEEP_AWAKE=never"


def test_a_choice_that_the_system_refuses_says_so() -> None:
    switches = Switches.of(Settings())
    switches.note_awake_refusal("this machine may sleep while it answers: caffeinate is missing")
    assert "caffeinate is missing" in switches.describe()["keep_awake"]["reason"]
    switches.change({"keep_awake": "never"})
    assert switches.describe()["keep_awake"]["reason"] == ""
