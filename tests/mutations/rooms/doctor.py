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
)
