"""Mutations of `hvdtrain/comm/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "comm/rounds.py",
        "            if self._client.is_broken():\n"
        '                raise HorovodInternalError("the round has lost a rank")\n'
        "            yield part\n",
        "            yield part\n"
        "            if self._client.is_broken():\n"
        '                raise HorovodInternalError("the round has lost a rank")\n',
        "a survivor computes another micro-batch before it gives the step up",
        "tests/comm/test_rounds.py",
    ),
)
