from __future__ import annotations

import pytest

from hvdtrain.runtime.environment import by_gloo, elastic
from hvdtrain.runtime.gloo import describe_exposure

STOCK = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.5", "HOROVOD_GLOO_RENDEZVOUS_PORT": "40123"}
ELASTIC = {**STOCK, "HOROVOD_ELASTIC": "1"}
OURS = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1:4711/SECRET/3", "HOROVOD_GLOO_RENDEZVOUS_PORT": "0"}


def test_an_elastic_job_of_stock_horovod_is_warned_of_its_rendezvous_and_a_plain_one_of_its_port() -> None:
    text = describe_exposure(ELASTIC)
    assert all(part in text for part in ("10.0.0.5", "40123", "CVE-2024-10190", "CVE-2026-31234", "hvdtrain launch"))
    text = describe_exposure(STOCK)
    assert "40123" in text and "CVE" not in text


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OMPI_COMM_WORLD_RANK": "0", "HOROVOD_ELASTIC": "1"},
        {**OURS, "HOROVOD_ELASTIC": "1"},
        {**ELASTIC, "HVDTRAIN_CHANNEL": "5"},
    ],
    ids=["alone", "mpirun", "our store", "our driver"],
)
def test_no_warning_where_that_server_is_not_used(environ: dict[str, str]) -> None:
    assert describe_exposure(environ) == ""


@pytest.mark.parametrize(
    ("environ", "gloo", "ours"),
    [
        ({}, False, False),
        ({"OMPI_COMM_WORLD_RANK": "0"}, False, False),
        ({**ELASTIC, "HOROVOD_RANK": "0", "HOROVOD_CPU_OPERATIONS": "gloo"}, True, False),
        ({"HOROVOD_RANK": "0"}, True, False),
        ({"HOROVOD_RANK": "0", "HOROVOD_CPU_OPERATIONS": "MPI"}, False, False),
        ({"HVDTRAIN_CHANNEL": "5"}, True, True),
    ],
)
def test_which_jobs_exchange_by_gloo_and_have_our_driver(environ: dict[str, str], gloo: bool, ours: bool) -> None:
    assert (by_gloo(environ), elastic(environ)) == (gloo, ours)
