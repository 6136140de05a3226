"""Mutations of `hvdtrain/doctor/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("doctor/hosts/checks.py", "tests/doctor/hosts/test_checks.py"): {
        "doctor warns of locked memory where only TCP is used": (
            "for host, facts in survey.facts.items() if facts.host.fabric}",
            "for host, facts in survey.facts.items()}",
        ),
    },
}
