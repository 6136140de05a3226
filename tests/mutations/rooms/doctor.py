"""Mutations of `hvdtrain/doctor/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("doctor/hosts/checks.py", "tests/doctor/hosts/test_checks.py"): {
        "doctor warns of locked memory where only TCP is used": (
            "for host, facts in survey.facts.items() if facts.host.fabric}",
            "for host, facts in survey.facts.items()}",
        ),
    },
    ("doctor/hosts/survey.py", "tests/doctor/hosts/test_clock_offset.py"): {
        "the time of the question counts as an offset of the clocks": (
            "Offset((there - (sent + came) / 2) * 1e-9,",
            "Offset((there - sent) * 1e-9,",
        ),
    },
}
