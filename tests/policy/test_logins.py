"""A secret becomes user and password, or is refused without a word of its value."""

import pytest

from policy.logins import LoginPlan, login_of

CANARY = "canary-in-the-value"


def test_a_value_is_a_login_or_the_password_of_a_named_user() -> None:
    assert ("app", f"{CANARY}:é 1") == login_of(LoginPlan("p/db", "s"), f"app:{CANARY}:é 1")
    assert ("app", f"x:{CANARY}") == login_of(LoginPlan("p/db", "s", "app"), f"x:{CANARY}")


VALUES = {
    "no user": f":{CANARY}",
    "no colon": CANARY,
    "no password": "app:",
    "a long user": f"{'u' * 64}:{CANARY}",
    "a user with a control character": f"a\np:{CANARY}",
    "a NUL": f"app:{CANARY}\0",
    "a line break": f"app:{CANARY}\n",
    "a surrogate": f"app:{CANARY}\ud800",
    "a long password": f"app:{CANARY * 60}",
}


@pytest.mark.parametrize("case", VALUES)
def test_another_value_is_refused_without_its_text(case: str) -> None:
    with pytest.raises(ValueError, match="secret 's'") as caught:
        login_of(LoginPlan("p/db", "s"), VALUES[case])
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("user", ["", "u" * 64, "é" * 32, "a\0b"])
def test_a_plan_has_the_name_of_a_user(user: str) -> None:
    with pytest.raises(ValueError, match="name of a database's user"):
        LoginPlan("p/db", "s", user)


def test_plans_collide_if_they_send_something_else() -> None:
    plan = LoginPlan("p/db", "s", "app")
    assert not plan.collides(LoginPlan("p/other", "s", "app"))
    assert plan.collides(LoginPlan("p/db", "t", "app"))
    assert plan.collides(LoginPlan("p/db", "s"))
