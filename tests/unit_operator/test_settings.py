"""The operator's environment variables."""

from __future__ import annotations

import pytest

from orbit_operator.settings import Settings, load_settings
from orbit_runtime.errors import UsageError


def test_an_empty_environment_gives_the_defaults() -> None:
    assert load_settings({"PATH": "/bin", "ORBIT_OPERATOR_NAMESPACES": ""}) == Settings()


def test_every_kind_of_value_is_read() -> None:
    settings = load_settings(
        {
            "ORBIT_OPERATOR_NAMESPACES": "a, b,",
            "ORBIT_OPERATOR_WORKERS": "9",
            "ORBIT_OPERATOR_POLL_SECONDS": "2.5",
            "ORBIT_OPERATOR_NETWORK_POLICIES": "False",
            "ORBIT_OPERATOR_IDENTITY": "pod-1",
        }
    )
    assert (settings.namespaces, settings.workers, settings.poll_seconds) == (("a", "b"), 9, 2.5)
    assert (settings.network_policies, settings.holder, settings.is_cluster_wide) == (False, "pod-1", False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORKERS", "many"),
        ("WORKERS", "0"),
        ("POLL_SECONDS", "-1"),
        ("POLL_SECONDS", "nan"),
        ("NETWORK_POLICIES", "maybe"),
        ("LOG_LEVEL", "Loud"),
        ("NO_SUCH", "1"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings({f"ORBIT_OPERATOR_{name}": value})
    assert caught.value.where == f"ORBIT_OPERATOR_{name}"
    assert caught.value.exit_code == 64


def test_what_kubernetes_says_of_a_service_of_the_same_name_is_no_setting() -> None:
    assert load_settings({"ORBIT_OPERATOR_SERVICE_HOST": "10.0.0.1", "ORBIT_OPERATOR_PORT_8080_TCP": "x"}) == Settings()
