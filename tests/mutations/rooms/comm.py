"""Mutations of `hvdtrain/comm/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("comm/rounds.py", "tests/comm/test_rounds.py"): {
        "a survivor computes another micro-batch before it gives the step up": (
            "            if self._client.is_broken():\n"
            '                raise HorovodInternalError("the round has lost a rank")\n'
            "            yield part\n",
            "            yield part\n"
            "            if self._client.is_broken():\n"
            '                raise HorovodInternalError("the round has lost a rank")\n',
        ),
    },
}
