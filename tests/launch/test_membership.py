"""Membership of a job, rule by rule; the laws over any history are in test_membership_laws.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvdtrain.launch.job import KillWorker, Limits, SendMessage
from tests.support.job_world import FakeWorker, World

ELASTIC = Limits(start=4, least=2, most=4)
TWO = replace(ELASTIC, start=2)
TWO_HOSTS = {"a": 2, "b": 2}


def world(limits: Limits = ELASTIC, hosts: dict[str, int] | None = None, **how: bool) -> World:
    return World(limits, hosts or TWO_HOSTS, **how)


@pytest.fixture
def job() -> World:
    """Four ranks on two hosts, in their first round."""
    return world()


def with_a_starting_rank() -> tuple[World, FakeWorker]:
    """A job of two ranks that train, and the process of a third that has not asked for a place."""
    job = World(TWO, {"a": 2})
    job.joining = False
    job.hosts({"a": 3})
    _, _, starting = job.living()
    return job, starting


def train(job: World) -> None:
    for worker in job.round():
        worker.step = 3
        job.alive(worker)


def sizes(job: World) -> list[int]:
    return [len(ranks) for ranks in job.rounds]


def said(job: World, word: str) -> list[str]:
    return [text for text in job.said if word in text]


def end_all(job: World) -> None:
    """All in the round end by themselves, each before it could follow the others."""
    ranks = job.round()
    for worker in ranks:
        worker.deaf = True
    for worker in ranks:
        job.exit(worker, 1)


def send_signal(job: World, name: str = "SIGTERM") -> None:
    job.members.signal_received(name, job.now_s)
    job.tick(0)


def wait_for_one(job: World, one: FakeWorker, idle_s: float, waited_s: float = 61) -> None:
    """All but one have waited in a collective for a time; that one has made no progress for another."""
    for worker in job.round():
        if worker is not one:
            job.alive(worker, idle_s=waited_s, waiting=True)
    job.alive(one, idle_s=idle_s)


class TestStart:
    @pytest.mark.parametrize(
        ("most", "asking", "wait_s", "rounds"),
        [
            pytest.param(4, 3, 60, [], id="all that were requested are waited for"),
            pytest.param(4, 4, 0, [4], id="until the last"),
            pytest.param(4, 2, ELASTIC.start_timeout_s + 1, [2], id="after a time the least will do"),
            pytest.param(6, 6, 0, [6], id="ranks beyond N join if ready within a second"),
            pytest.param(6, 4, 2, [4], id="those that are far behind do not"),
        ],
    )
    def test_whom_the_first_round_waits_for(self, most: int, asking: int, wait_s: float, rounds: list[int]) -> None:
        job = world(replace(ELASTIC, most=most), {"a": 10}, joining=False)
        assert len(job.living()) == most
        for worker in job.living()[:asking]:
            job.join(worker)
            job.tick()
        job.wait(wait_s)
        assert sizes(job) == rounds and {w.size for w in job.round()} == set(rounds)
        assert rounds or not job.said, "they start slowly"

    @pytest.mark.parametrize(("ranks", "given", "timeout_s"), [(4, 0, 10), (160, 0, 20), (160, 7, 7)])
    def test_more_ranks_have_more_time_to_find_each_other(self, ranks: int, given: int, timeout_s: int) -> None:
        job = world(Limits(start=ranks, least=1, most=ranks, gloo_timeout_s=given), {"a": ranks})
        assert {w.place["timeout_s"] for w in job.round()} == {timeout_s}

    def test_fewer_than_min_end_the_job_with_the_missing_ranks(self) -> None:
        job = World(ELASTIC, {"a": 1})
        job.wait(2 * ELASTIC.start_timeout_s)
        assert job.code == 1 and "1 of at least 2" in job.said[-1] and "a: 1 slot" in job.said[-1]

    @pytest.mark.parametrize("slots", [3, 1])
    def test_too_few_slots_are_reported_once_before_the_wait(self, slots: int) -> None:
        job = World(ELASTIC, {"a": slots})
        job.wait(30)
        (text,) = job.said
        assert f"{slots} slot" in text and "4 ranks" in text and ("2 are enough" in text) == (slots >= 2)
        job.hosts({"a": 4})
        assert sizes(job) == [4]

    def test_ranks_that_do_not_start_are_reported_once_while_others_wait(self) -> None:
        job = World(replace(TWO, least=1), {"a": 1, "b": 1}, joining=False)
        job.unreachable.add("b")
        job.cut("b")
        job.join(job.living()[0])
        job.wait(9)
        assert not said(job, "ready"), "it may come soon"
        job.wait(90)
        (text,) = said(job, "ready")
        assert "1 of 2" in text and "missing on b" in text
        job.wait(ELASTIC.start_timeout_s)
        assert sizes(job) == [1]

    def test_wrong_options_end_the_job_with_their_exit_code(self) -> None:
        job = world(replace(ELASTIC, restarts=5), joining=False)
        job.exit(job.living()[0], 2)
        assert job.code == 2 and not job.living() and not said(job, "started again")

    @pytest.mark.parametrize("trained", [False, True])
    def test_a_repeating_error_is_not_tried_again_before_the_first_step(self, trained: bool) -> None:
        job = world(replace(ELASTIC, restarts=5))
        if trained:
            train(job)
        job.exit(job.by_rank(0), 2)
        assert (job.code, len(job.round())) == ((None, 3) if trained else (2, 0)), "the others can go on after a step"

    def test_one_that_ends_while_others_wait_for_it_has_not_done_their_work(self) -> None:
        job = world(joining=False)
        *others, last = job.living()
        for worker in others:
            job.join(worker)
        job.exit(last, 0)
        assert job.code is None and all(w.alive for w in others)
        job.joining = True
        job.wait(2)
        assert sizes(job) == [4], "it is started again"

    def test_one_that_ends_before_it_asks_after_all_was_started_again_has_failed(self) -> None:
        job = world(replace(ELASTIC, restarts=1))
        job.joining = False
        end_all(job)
        job.wait(2)
        for worker in job.living():
            job.exit(worker, 0)
        assert job.code == 1

    def test_none_that_comes_so_far_ends_the_job(self) -> None:
        for code in (0, 1):
            job = world(joining=False)
            for worker in job.living():
                job.exit(worker, code)
            assert job.code == code, "a program may have nothing to train"
        assert "exit code 1" in job.said[-1]
        assert len(said(job, "started again in")) == 3, "a job that ends announces no retry"
        job = World(ELASTIC, {"b": 1, "c": 1}, joining=False)
        job.cut("b")
        job.cut("c")
        assert job.code == 1 and len(said(job, "tried again in")) == 1


class TestPlaces:
    def test_all_are_started_with_one_idea_of_how_many_there_are(self) -> None:
        """Settings that must be equal on all ranks depend on the number; the agents start one after the other."""
        job = world(joining=False)
        assert [(w.place["size"], w.place["local_size"]) for w in job.living()] == [(4, 2)] * 4
        alone = World(replace(ELASTIC, start=1), {"a": 1}, joining=False)
        assert alone.living()[0].place["size"] > 1, "others may come"

    def test_ranks_go_by_host_and_slot(self) -> None:
        keys = ("rank", "local_rank", "local_size", "cross_rank", "cross_size")
        places = [tuple(w.place[k] for k in keys) for w in world().round()]
        assert places == [(0, 0, 2, 0, 2), (1, 1, 2, 0, 2), (2, 0, 2, 1, 2), (3, 1, 2, 1, 2)]

    def test_survivors_keep_their_order_before_newcomers(self) -> None:
        job = world(hosts={"a": 4})
        survivors = [w.number for w in job.round()[1:]]
        job.exit(job.by_rank(0))
        assert [w.number for w in job.round()] == survivors
        job.wait(4)
        before = [w.number for w in job.round()]
        assert before[:3] == survivors and before[3] == max(before), "the newcomer, in the first slot"
        job.exit(job.by_rank(0))
        assert [w.number for w in job.round()] == before[1:], "by the rank that they had, not by the slot"

    def test_survivors_of_the_launching_host_come_before_others(self) -> None:
        job = World(replace(ELASTIC, least=1), {"b": 1, "a": 1, "c": 2})
        assert job.by_rank(0).host == "a"
        job.exit(job.by_rank(0))
        job.wait(4)
        assert job.by_rank(0).host == "b"  # a newcomer of the launching host knows nothing yet
        job.exit(job.by_rank(2))
        assert job.by_rank(0).host == "a"


class TestFailure:
    @pytest.mark.parametrize("code", [-9, 1, 0])
    def test_the_others_are_notified_at_once_and_continue(self, job: World, code: int) -> None:
        others = job.round()[:1] + job.round()[2:]
        now_s = job.now_s
        job.exit(job.by_rank(1), code)
        assert all(w.told == ["round", "broken", "round"] for w in others)
        assert len(job.round()) == 3 and job.now_s == now_s
        job.wait(0.9)
        assert len(job.living()) == 3, "a pause before it is started again"
        job.wait(3)
        assert sizes(job) == [4, 3, 4]

    def test_the_others_continue_before_its_process_has_ended(self, job: World) -> None:
        others = job.round()[:1] + job.round()[2:]
        dying = job.by_rank(1)
        job.die(dying)
        assert all(w.told == ["round", "broken", "round"] for w in others)
        assert len(job.round()) == 3
        job.wait(5)
        assert len(job.living()) == 4 and len(job.rounds) == 2, "its slot is taken until then"
        job.exit(dying)
        assert "rank 1 on a was killed by SIGKILL" in job.said[-1]
        job.wait(3)
        assert sizes(job) == [4, 3, 4]

    def test_a_rank_that_cannot_be_killed_is_reported(self, job: World) -> None:
        job.die(job.by_rank(1))
        job.wait(ELASTIC.end_s + 1)
        assert said(job, "rank 1 on a did not end in time")

    def test_one_that_dies_between_two_rounds_is_not_waited_for(self, job: World) -> None:
        dying, late = job.by_rank(1), job.by_rank(2)
        late.deaf = True
        job.exit(job.by_rank(0))
        job.die(dying)
        job.join(late, "failed")
        assert sizes(job) == [4, 2] and not dying.inside

    def test_newcomers_do_not_restart_while_the_last_rank_with_the_state_dies(self) -> None:
        job = world(replace(ELASTIC, least=1))
        for worker in job.round()[1:]:
            job.exit(worker)
        job.joining = False
        job.wait(3)
        newcomers = [w for w in job.living() if not w.round]
        job.die(job.by_rank(0))
        for worker in newcomers:
            job.join(worker)
        job.wait(1)
        assert newcomers and not job.round()

    def test_one_that_ends_as_it_said_breaks_nothing(self, job: World) -> None:
        first = job.by_rank(0)
        job.say(first, "leaving", why="finished")
        job.die(first)
        assert all(w.told == ["round"] for w in job.round())

    def test_the_last_one_ends_the_job_when_it_is_known_how_it_ended(self) -> None:
        job = World(Limits(start=1, least=1, most=1), {"a": 1})
        (only,) = job.round()
        job.die(only)
        job.wait(1)
        assert job.code is None
        job.exit(only, 7)
        assert job.code == 1 and "ended with exit code 7" in job.said[-1]

    def test_a_slot_that_keeps_failing_is_tried_ever_more_rarely_and_never_given_up(self, job: World) -> None:
        job.joining = False
        job.exit(job.by_rank(3))
        tries = 0
        for _ in range(400):
            job.wait(1)
            for worker in job.living():
                if not worker.round:
                    tries += 1
                    job.exit(worker, 1)
        assert 10 <= tries <= 12 and len(job.round()) == 3  # after 1, 2, 4 ... 60, 60, 60 s

    def test_time_in_rounds_makes_its_failures_forgotten(self, job: World) -> None:
        for _ in range(4):
            job.exit(job.by_rank(3))
            job.wait(40)
            assert len(job.round()) == 4
        assert len(said(job, "started again in 1 s")) == 4

    def test_the_next_round_waits_for_all_that_are_left(self, job: World) -> None:
        late = job.by_rank(2)
        late.deaf = True
        job.exit(job.by_rank(0))
        job.wait(3)
        assert len(job.rounds) == 1
        job.join(late, "failed")
        assert len(job.rounds) == 2

    @pytest.mark.parametrize("why", ["failed", "changed"])
    def test_one_that_leaves_the_round_by_itself_takes_the_others_with_it(self, job: World, why: str) -> None:
        left = job.by_rank(1)
        job.join(left, why, "Connection reset")
        assert sizes(job) == [4, 4] and not job.code
        assert left.told == ["round", "round"], "a rank that has left is not asked to leave"

    def test_not_elastic_a_death_ends_the_job(self) -> None:
        job = world(Limits(4, 4, 4, elastic=False))
        train(job)
        others = job.round()[:1] + job.round()[2:]
        job.exit(job.by_rank(1))
        assert all(w.told == ["round", "broken", "end"] for w in others), "they can say what they know of it"
        assert job.code == 1 and "rank 1 on a was killed by SIGKILL" in job.said[-1] and "--restarts" in job.said[-1]

    def test_not_elastic_it_starts_again_as_often_as_it_may(self) -> None:
        job = world(Limits(4, 4, 4, elastic=False, restarts=2))
        for _ in range(3):
            job.exit(job.by_rank(1))
            job.wait(5)
        assert sizes(job) == [4, 4, 4] and job.code == 1

    def test_rounds_that_never_make_a_step_end_the_job(self, job: World) -> None:
        for _ in range(ELASTIC.fruitless + 1):
            assert job.code is None
            job.join(job.by_rank(1), "failed", "no route to host")
        assert job.code == 1 and "no route to host" in job.said[-1]

    def test_rounds_that_make_steps_may_break_for_ever(self, job: World) -> None:
        for step in range(5 * ELASTIC.fruitless):
            for worker in job.round():
                worker.step = step
            job.join(job.by_rank(1), "failed")
        assert job.code is None

    def test_the_limit_of_rounds(self) -> None:
        job = world(replace(ELASTIC, reset_limit=2))
        job.exit(job.by_rank(0))
        job.wait(10)
        assert sizes(job) == [4, 3, 4] and job.code is None
        job.exit(job.by_rank(0))
        assert job.code == 1 and "--reset-limit" in job.said[-1]


class TestBelowTheLeast:
    def test_survivors_wait_for_newcomers(self) -> None:
        job = World(TWO, {"a": 2})
        survivor = job.by_rank(0)
        job.exit(job.by_rank(1))
        assert len(job.rounds) == 1 and survivor.alive
        job.wait(3)
        assert sizes(job) == [2, 2] and job.by_rank(0) is survivor

    def test_after_the_timeout_the_job_ends_with_the_missing_ranks(self) -> None:
        job = World(TWO, {"a": 1, "b": 1})
        job.unreachable.add("b")
        job.cut("b")
        job.wait(ELASTIC.elastic_timeout_s - 5)
        assert job.code is None and job.living()
        job.wait(6)
        assert job.code == 1 and not job.living()
        assert "1 of at least 2" in job.said[-1] and "b: 1 slot(s), not reached" in job.said[-1]

    @pytest.mark.parametrize("lost", [True, False], ids=["a host is lost", "a host is removed"])
    def test_each_wait_has_a_time_of_its_own(self, lost: bool) -> None:
        job = World(TWO, {"a": 1, "b": 1})
        for _ in range(2):
            if lost:
                job.unreachable.add("b")
                job.cut("b")
            else:
                job.hosts({"a": 1})
            job.wait(ELASTIC.elastic_timeout_s - 100)
            job.unreachable.clear()
            job.hosts({"a": 1, "b": 1})
            job.wait(70)
            assert len(job.round()) == 2 and job.code is None
        assert len(job.rounds) == (3 if lost else 1), "ranks stay while too few would remain"


class TestAllFail:
    @pytest.mark.parametrize("trained", [True, False])
    @pytest.mark.parametrize("restarts", [0, 1])
    def test_without_restarts_it_ends(self, restarts: int, trained: bool) -> None:
        job = world(replace(ELASTIC, restarts=restarts))
        if trained:
            train(job)
        end_all(job)
        assert job.code == (None if restarts else 1) and said(job, "no rank is left")
        assert bool(said(job, "checkpoint")) == trained, "there is none before the first step"

    def test_each_restart_begins_with_newcomers_only_and_ends_some_day(self) -> None:
        job = world(replace(ELASTIC, restarts=2))
        for _ in range(3):
            assert job.code is None and all(w.told == ["round"] for w in job.round())
            end_all(job)
            job.wait(10)
        assert job.code == 1 and len(job.rounds) == 3

    def test_a_restart_after_all_hosts_were_lost_tries_them_again(self) -> None:
        job = world(replace(ELASTIC, restarts=1))
        for host in ("a", "b"):
            job.cut(host)
        job.wait(5)
        assert sizes(job) == [4, 2, 4]

    def test_a_restart_does_not_wait_for_a_lost_host(self) -> None:
        job = world(replace(ELASTIC, restarts=1))
        job.unreachable.add("b")
        for worker in job.round():
            worker.deaf = True
        job.cut("b")
        end_all(job)
        job.wait(10)
        assert sizes(job) == [4, 2]


class TestGrowth:
    def test_a_burst_of_newcomers_makes_one_round(self) -> None:
        job = World(replace(TWO, most=8), {"a": 2})
        for slots in range(3, 9):
            job.hosts({"a": slots})
            job.tick(0.3)
        assert len(job.rounds) == 1
        job.wait(2)
        assert sizes(job) == [2, 8]

    def test_an_unending_burst_is_not_waited_for(self) -> None:
        job = World(replace(TWO, most=100), {"a": 2})
        for slots in range(3, 40):
            job.hosts({"a": slots})
            job.wait(0.5)
        assert len(job.rounds) > 2

    def test_a_starting_rank_blocks_no_round_and_is_ended_where_its_slot_is_removed(self) -> None:
        job, starting = with_a_starting_rank()
        job.wait(60)
        assert len(job.rounds) == 1 and starting.alive
        job.hosts({"a": 2})
        assert len(job.living()) == 2 and len(job.rounds) == 1


class TestRemoval:
    def test_a_removed_host_leaves_at_the_next_step_and_may_come_back(self, job: World) -> None:
        gone, others = job.living("b"), job.living("a")
        job.hosts({"a": 2})
        assert all(w.alive for w in gone)
        job.wait(2)
        assert all(w.leaves for w in gone) and not any(w.leaves for w in others)
        assert sizes(job) == [4, 2] and not job.living("b") and job.code is None
        assert all(w.told == ["round", "changed", "end"] for w in gone) and "b" not in job.agents
        job.hosts(TWO_HOSTS)
        job.wait(3)
        assert sizes(job) == [4, 2, 4]

    def test_the_last_slots_go_first(self) -> None:
        job = world(hosts={"a": 4})
        first = [w.number for w in job.round()][:3]
        job.hosts({"a": 3})
        job.wait(2)
        assert [w.number for w in job.round()] == first

    def test_a_removal_revoked_in_time_changes_nothing(self, job: World) -> None:
        job.hosts({"a": 2})
        job.hosts(TWO_HOSTS)
        job.wait(5)
        assert sizes(job) == [4] and all(w.told == ["round"] for w in job.round())

    def test_ranks_with_the_state_stay_until_others_have_it(self) -> None:
        job = World(TWO, {"a": 2})
        job.hosts({"b": 2})
        job.wait(5)
        assert all(set(before) & set(after) for before, after in zip(job.rounds, job.rounds[1:], strict=False))
        assert {w.host for w in job.round()} == {"b"} and not job.living("a")

    def test_no_rank_leaves_while_too_few_would_remain(self) -> None:
        job = World(TWO, {"a": 2})
        job.hosts({"a": 1})
        job.wait(60)
        assert len(job.rounds) == 1, "they are not asked again and again"
        (text,) = said(job, "at least 2 are needed")
        assert len(job.round()) == 2 and "1 must leave (a " in text and "ends in 600 s" in text
        job.wait(ELASTIC.elastic_timeout_s)
        assert job.code == 1 and not job.living()
        assert said(job, "2 rank(s) that train get SIGTERM") and not said(job, "finished training")

    def test_a_rank_with_sigterm_leaves_and_its_slot_rests(self, job: World) -> None:
        leaver = job.by_rank(1)
        job.say(leaver, "drain")
        assert "stays empty for 60 s" in job.said[-1]
        job.wait(2)
        assert leaver.told == ["round", "changed", "end"] and sizes(job) == [4, 3]
        job.wait(50)
        assert len(job.round()) == 3
        job.wait(15)
        assert len(job.round()) == 4

    def test_the_host_of_a_wrong_rank_is_left_out(self, job: World) -> None:
        wrong = job.by_rank(3)
        job.say(job.by_rank(0), "wrong", round=1, rank=3)
        assert f"{wrong.host} is left out" in job.said[-1]
        job.hosts(TWO_HOSTS)
        job.wait(300)
        assert sizes(job) == [4, 2] and wrong.host not in {w.host for w in job.round()}

    @pytest.mark.parametrize(
        ("limits", "hosts", "round"), [(ELASTIC, {"a": 4}, 1), (replace(ELASTIC, elastic=False), TWO_HOSTS, 1)]
    )
    def test_it_stays_if_the_job_needs_it(self, limits: Limits, hosts: dict[str, int], round: int) -> None:
        job = world(limits, hosts)
        job.say(job.by_rank(0), "wrong", round=round, rank=3)
        assert "wrong bits" in job.said[-1] and not said(job, "left out")
        job.wait(60)
        assert sizes(job) == [4]

    def test_a_report_of_an_earlier_round_counts_no_more(self, job: World) -> None:
        job.exit(job.by_rank(1))
        job.say(job.round()[0], "wrong", round=1, rank=1)
        assert not said(job, "wrong bits")


class TestEnd:
    def test_the_first_to_finish_does_not_end_the_others(self, job: World) -> None:
        first, *others = job.round()
        job.finish(first)
        job.wait(ELASTIC.grace_s - 1)
        assert all(w.alive and w.told == ["round"] for w in others)
        for worker in others:
            job.finish(worker)
            job.wait(20)
        assert job.code == 0

    def test_a_rank_that_finishes_too_late_is_killed(self, job: World) -> None:
        first, second, *_ = job.round()
        job.finish(first)
        job.say(second, "leaving", why="finished")  # it writes: it has more time
        job.wait(ELASTIC.grace_s + 5)
        assert second.alive and job.living() == [second]
        job.exit(second, 0)
        assert job.code == 0

    def test_a_late_rank_is_killed_while_the_first_still_writes(self, job: World) -> None:
        first, *_ = job.round()
        job.say(first, "leaving", why="finished")
        job.wait(ELASTIC.grace_s + 1)
        assert job.living() == [first]

    def test_no_round_begins_when_one_has_finished(self, job: World) -> None:
        first, second, *_ = job.round()
        job.say(first, "leaving", why="finished")
        job.exit(second)
        assert len(job.rounds) == 1
        job.exit(first, 0)
        assert job.code == 0

    def test_work_that_is_spoilt_at_the_end_is_not_done(self, job: World) -> None:
        for worker in job.round():
            job.finish(worker, code=-9 if worker.rank == 0 else 0)
        assert job.code == 1 and "rank 0" in job.said[-1]

    @pytest.mark.parametrize(
        ("last", "exits", "elastic", "code"),
        [
            pytest.param(0, -9, True, 1, id="rank 0 dies before its end: the job is not finished"),
            pytest.param(3, 7, True, 0, id="where ranks may leave, the others have done its work"),
            pytest.param(3, 7, False, 1, id="where ranks stay, each has work of its own"),
        ],
    )
    def test_one_that_dies_when_all_others_have_finished(self, last: int, exits: int, elastic: bool, code: int) -> None:
        job = world(replace(ELASTIC, elastic=elastic))
        dies = job.by_rank(last)
        for worker in job.round():
            if worker is not dies:
                job.finish(worker)
        job.exit(dies, exits)
        assert job.code == code and said(job, f"rank {last} on ")

    @pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
    def test_a_signal_lets_all_save(self, job: World, name: str, code: int) -> None:
        everybody = job.round()
        send_signal(job, name)
        assert job.code == code and all(w.told == ["round", "stop"] for w in everybody)

    def test_ranks_that_end_by_a_signal_of_their_own_end_the_job_by_it(self, job: World) -> None:
        for worker in job.round():
            job.finish(worker, "SIGTERM", 143)
        assert job.code == 143

    @pytest.mark.parametrize("restarts", [0, 3])
    def test_a_signal_while_they_finish_lets_them_and_starts_nothing_again(self, restarts: int) -> None:
        job = world(replace(ELASTIC, restarts=restarts))
        first, *others = job.round()
        job.say(first, "leaving", why="finished")
        send_signal(job)
        assert first.alive and first.told == ["round"] and all(w.told == ["round", "stop"] for w in others)
        send_signal(job)
        assert job.code == 143 and not job.living() and not said(job, "started again")

    @pytest.mark.parametrize("grace_s", [ELASTIC.grace_s, float("inf")])
    @pytest.mark.parametrize("deaf", [4, 1])
    def test_a_rank_that_does_not_stop_is_killed(self, deaf: int, grace_s: float) -> None:
        job = world(replace(ELASTIC, grace_s=grace_s))
        for worker in job.round()[:deaf]:
            worker.deaf = True
        send_signal(job)
        job.wait(ELASTIC.stop_s - 1)
        assert len(job.living()) == deaf
        job.wait(2)
        assert not job.living() and job.code == 143

    def test_between_two_rounds_they_get_one_to_save_in(self, job: World) -> None:
        late = job.by_rank(3)
        late.deaf = True
        job.exit(job.by_rank(0))
        send_signal(job)
        late.deaf = False
        job.join(late, "failed")
        assert job.code == 143 and len(job.rounds[1]) == 3 and late.told[-2:] == ["round", "stop"]


class TestHangs:
    def test_a_stopped_rank_is_killed(self, job: World) -> None:
        stopped = job.by_rank(2)
        stopped.deaf = True
        job.alive(stopped)
        job.wait(3)
        job.members.agent_heartbeat("b", {stopped.number: True}, job.now_s)
        assert stopped.alive
        job.wait(3)
        assert not stopped.alive and len(job.round()) == 3

    def test_one_that_is_stopped_before_it_ever_spoke_is_killed(self) -> None:
        job, stopped = with_a_starting_rank()
        stopped.deaf, other = True, job.by_rank(0)
        for _ in range(4):
            job.alive(other)
            job.members.agent_heartbeat("a", {stopped.number: True}, job.now_s)
            job.wait(1)
        assert stopped.alive
        job.wait(3)
        assert not stopped.alive and other.alive

    def test_a_job_that_is_stopped_as_a_whole_is_left_alone(self, job: World) -> None:
        for worker in job.round():
            job.alive(worker)
            worker.deaf = True
        job.wait(2)
        for worker in job.round():
            job.members.agent_heartbeat(worker.host, {worker.number: True}, job.now_s)
        job.wait(100)
        assert len(job.round()) == 4

    def test_a_hanging_rank_prints_its_stack_before_it_is_killed(self, job: World) -> None:
        job.wait(70)
        held = job.by_rank(1)
        for worker in job.round():
            facts = {"round": worker.round, "step": 5, "idle_s": 61.0, "waiting": worker is not held}
            job.members.worker_message(worker.number, {"type": "alive", **facts}, job.now_s)
        asked = job.members.tick(job.now_s)
        assert [(c.kind, c.worker) for c in asked if isinstance(c, SendMessage)] == [("stacks", held.number)]
        (kill,) = (c for c in asked if isinstance(c, KillWorker))
        assert kill.worker == held.number and kill.after_s > 0

    def test_a_rank_that_never_requests_a_place_is_started_again(self) -> None:
        job, stuck = with_a_starting_rank()
        job.wait(ELASTIC.start_timeout_s - 10)
        assert stuck.alive
        job.wait(30)
        assert not stuck.alive and len(job.living()) == 3 and len(job.rounds) == 1

    def test_one_that_cannot_speak_has_as_long_as_one_that_hangs(self, job: World) -> None:
        mute = job.by_rank(2)
        job.alive(mute)
        mute.deaf = True
        job.wait(55)
        assert mute.alive
        job.wait(10)
        assert not mute.alive

    def test_a_rank_that_blocks_the_others_is_killed_after_the_timeout(self, job: World) -> None:
        job.wait(500)
        hung = job.by_rank(3)
        wait_for_one(job, hung, 30, waited_s=500)
        assert hung.alive, "it is slow"
        wait_for_one(job, hung, 59)
        assert hung.alive
        job.alive(hung, idle_s=61)
        assert not hung.alive and len(job.round()) == 3 and said(job, "rank 3 on b hangs")

    @pytest.mark.parametrize("idle_s", [0, 61])
    def test_the_only_one_left_that_never_leaves_a_broken_round_is_killed_unless_it_is_at_work(
        self, idle_s: int
    ) -> None:
        """No other rank waits for it yet."""
        job = World(replace(TWO, least=1), {"a": 2})
        job.joining = False
        gone, left = job.round()
        left.deaf = True
        job.die(gone)
        for second in range(70):
            assert left.alive or second > 55
            if left.alive:
                job.alive(left, idle_s=min(second, idle_s))
            job.wait(1)
        assert left.alive == (idle_s == 0)

    @pytest.mark.parametrize("says", [True, False])
    def test_one_that_compiles_has_ten_times_as_long(self, job: World, says: bool) -> None:
        """It, or a compiler that it has started, uses the processor, and may send no message meanwhile."""
        job.wait(700)
        *others, at_work = job.round()
        job.alive(at_work)
        at_work.deaf = True
        for second in range(5, 620, 5):
            assert at_work.alive or second > 600
            for worker in filter(lambda worker: worker.alive, others):
                job.alive(worker, idle_s=second, waiting=True)
            if at_work.alive:
                job.members.agent_heartbeat(at_work.host, {}, job.now_s, [at_work.number])
                if says:
                    job.alive(at_work, idle_s=second)
            job.wait(5)
        assert not at_work.alive

    def test_one_that_computes_no_longer_is_one_that_hangs(self, job: World) -> None:
        job.wait(200)
        hung = job.by_rank(3)
        hung.deaf = True
        job.members.agent_heartbeat(hung.host, {}, job.now_s, [hung.number])
        for idle_s in (61, 70):
            wait_for_one(job, hung, idle_s, waited_s=idle_s)
            assert hung.alive == (idle_s == 61)
            job.wait(20)

    def test_computation_before_the_hang_does_not_count(self) -> None:
        job = world(replace(ELASTIC, hang_timeout_s=1))
        job.wait(20)
        hung = job.by_rank(3)
        job.members.agent_heartbeat(hung.host, {}, job.now_s, [hung.number])
        wait_for_one(job, hung, 2, waited_s=2)
        assert not hung.alive

    def test_no_rank_hangs_while_another_still_works(self, job: World) -> None:
        job.wait(70)
        first, second, *others = job.round()
        for worker in others:
            job.alive(worker, idle_s=65, waiting=True)
        job.alive(first, idle_s=5)
        job.alive(second, idle_s=65)
        assert second.alive
        job.alive(first, idle_s=0.1, waiting=True)
        assert not second.alive

    @pytest.mark.parametrize("timeout_s", [ELASTIC.hang_timeout_s, 0])
    def test_no_rank_hangs_if_all_work_or_the_timeout_is_0(self, timeout_s: float) -> None:
        job = world(replace(ELASTIC, hang_timeout_s=timeout_s))
        job.wait(70)
        for worker in job.round():
            job.alive(worker, idle_s=1e6, waiting=not timeout_s and worker.rank != 0)
        assert sizes(job) == [4] and len(job.round()) == 4

    def test_time_before_the_round_does_not_count_as_a_hang(self, job: World) -> None:
        job.wait(70)
        job.exit(job.by_rank(0))
        first = job.by_rank(0)
        wait_for_one(job, first, 1000, waited_s=0)
        assert first.alive

    def test_collectives_that_never_come_are_given_up(self, job: World) -> None:
        job.wait(70)
        for worker in job.round():
            job.alive(worker, idle_s=61, waiting=True)
        assert sizes(job) == [4, 4]

    def test_a_rank_that_does_not_leave_a_broken_round_is_killed(self, job: World) -> None:
        job.wait(70)
        stays = job.by_rank(2)
        stays.deaf = True
        job.exit(job.by_rank(0))
        for idle_s in range(61):
            assert stays.alive
            job.wait(1)
            job.alive(stays, idle_s=idle_s + 1, waiting=True)
        assert not stays.alive and len(job.round()) >= 2

    def test_a_driver_that_was_suspended_kills_no_rank(self, job: World) -> None:
        for worker in job.round():
            job.alive(worker)
        job.members.agent_heartbeat("b", {job.by_rank(3).number: True}, job.now_s)
        job.tick(1000)
        assert len(job.round()) == 4 and len(job.agents) == 2

    def test_a_host_with_an_agent_that_never_starts_is_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        job = World(TWO, {"a": 2})
        started: list[str] = []
        monkeypatch.setattr(job, "_start_agent", started.append)
        job.hosts(TWO_HOSTS)
        job.wait(2 * ELASTIC.agent_s + 10)
        assert started == ["b"] * 3 and len(job.round()) == 2
        assert said(job, "not ready within 120 s")

    def test_messages_of_ranks_count_as_heartbeats_of_their_host(self, job: World) -> None:
        for _ in range(int(ELASTIC.lost_s) + 5):
            for worker in job.round():
                job.alive(worker)
            job.members.agent_heartbeat("a", {}, job.now_s)  # what watches the ranks of b says nothing any more
            job.tick(1)
        assert sizes(job) == [4]

    def test_a_silent_host_is_lost_and_tried_again(self, job: World) -> None:
        job.unreachable.add("b")
        job.wait(ELASTIC.lost_s + 1)
        assert sizes(job) == [4, 2]
        job.unreachable.clear()
        job.wait(70)
        assert len(job.round()) == 4
