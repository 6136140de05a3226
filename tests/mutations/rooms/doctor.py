"""Mutations of `hvdtrain/doctor/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "doctor/hosts/checks.py",
        "for host, facts in survey.facts.items() if facts.host.fabric}",
        "for host, facts in survey.facts.items()}",
        "doctor warns of locked memory where only TCP is used",
        "tests/doctor/hosts/test_checks.py",
    ),
    mutation(
        "doctor/hosts/survey.py",
        "Offset((there - (sent + came) / 2) * 1e-9,",
        "Offset((there - sent) * 1e-9,",
        "the time of the question counts as an offset of the clocks",
        "tests/doctor/hosts/test_clock_offset.py",
    ),
)
