# SPDX-License-Identifier: Apache-2.0
"""The controller's P4Runtime messages to the built-in switch and to BMv2, and their effects."""

import asyncio
from dataclasses import replace

import pytest
from finsy.proto import p4r

from dlcp.controller.compiled_program import KINDS, difference, key_of
from dlcp.controller.fabric import FabricSwitch, Job, leaf_spine, star
from dlcp.controller.switch_client import ENDING_S, ControlError, Session, plan, reconcile, wanted
from dlcp.switch import Action, Entries, GroupRef, TableEntry
from tests.controller.switches import described, running
from tests.transport.free_ports import free_port

DEADLINE_S = 60


def fabric(**changes):
    return replace(star(3, ports="packet", jobs=[Job(1), Job(2, 0.02, 0.02)]), **changes)


def run(work):
    return asyncio.run(asyncio.wait_for(work, DEADLINE_S))


def applied(switch, pipeline, described_fabric, name="switch"):
    """Reconcile once in a session of its own, and return the changes and the switch's content afterwards."""

    async def work():
        async with Session(described(switch), pipeline) as session:
            await session.become_primary()
            outcome = await reconcile(session, should(described_fabric, pipeline, name))
            return outcome, await session.entities()

    return run(work())


def should(described_fabric, pipeline, name="switch"):
    return wanted(described_fabric, described_fabric.switch(name), pipeline)


def keys(entities):
    return sorted(map(key_of, entities))


def test_an_empty_switch_gets_program_and_entries_and_the_second_time_nothing_is_written(switch, pipeline):
    first, holds = applied(switch, pipeline, fabric())
    assert first.plan.install
    assert first.writes == 3  # members, groups, table entries
    assert keys(holds) == keys(should(fabric(), pipeline))
    assert len(difference(should(fabric(), pipeline), holds)) == 0
    second, again = applied(switch, pipeline, fabric())
    assert not second.plan
    assert second.writes == 0
    assert second.plan.difference.kept == len(holds)
    assert keys(again) == keys(holds)


def test_only_what_differs_is_written(switch, pipeline):
    before = fabric()
    applied(switch, pipeline, before)
    hosts = (before.hosts[0], replace(before.hosts[1], trusted=False), before.hosts[2])
    after = replace(before, hosts=hosts, jobs=(before.jobs[0], replace(before.jobs[1], share=0.01)))
    outcome, holds = applied(switch, pipeline, after)
    said = sorted(f"{KINDS[change.type]} {pipeline.describe(change.entity)}" for change in outcome.plan.difference)
    assert said[0] == "delete port_trust ig_port=2"
    assert [line.split(" -> ")[0] for line in said[1:]] == [
        f"modify job_share job=2 control=0 eg_port={port}" for port in (1, 2, 3)
    ]
    assert len(difference(should(after, pipeline), holds)) == 0


def test_routes_move_to_another_set_of_ports_without_being_interrupted(switch, pipeline):
    """The new group is there before the routes lead to it, and the old one goes when none does."""
    before = leaf_spine(2, 3, 2)
    applied(switch, pipeline, before, "leaf1")
    links = tuple(link for link in before.links if "spine3:1" not in (link.a, link.b))
    after = replace(before, links=links)
    outcome, holds = applied(switch, pipeline, after, "leaf1")
    steps = [(KINDS[change.type], change.entity.WhichOneof("entity")) for change in outcome.plan.difference]
    group, member, entry = "action_profile_group", "action_profile_member", "table_entry"
    routed = [step for step in steps if step[1] != entry or step[0] == "modify"]
    assert routed[0] == ("insert", group)
    assert routed[-2:] == [("delete", group), ("delete", member)]
    assert ("modify", entry) in routed[1:-2]
    assert len(difference(should(after, pipeline, "leaf1"), holds)) == 0


def test_foreign_entries_are_removed_and_missing_ones_restored(switch, pipeline):
    applied(switch, pipeline, fabric())

    async def meddle():
        async with Session(described(switch), pipeline) as session:
            await session.become_primary()
            foreign = TableEntry(
                "classify", {"job": (0x10, 0xF0)}, Action("set_class", {"queue": 7, "drop_class": 0}), 9
            )
            [added] = pipeline.encode(Entries(entries=(foreign,)))
            missing = next(entity for entity in should(fabric(), pipeline) if entity.HasField("table_entry"))
            await session.write([update("INSERT", added), update("DELETE", missing)])

    run(meddle())
    outcome, holds = applied(switch, pipeline, fabric())
    assert outcome.plan.difference.counts() == {"insert": 1, "modify": 0, "delete": 1}
    assert not outcome.plan.install
    assert keys(holds) == keys(should(fabric(), pipeline))


def test_a_restarted_switch_is_told_everything_again(switch, pipeline):
    applied(switch, pipeline, fabric())
    switch.restart()
    outcome, holds = applied(switch, pipeline, fabric())
    assert outcome.plan.install
    assert keys(holds) == keys(should(fabric(), pipeline))


def test_a_plan_needs_no_right_to_write_and_changes_nothing(switch, pipeline):
    async def work():
        async with Session(described(switch), pipeline) as primary, Session(described(switch), pipeline) as other:
            await primary.become_primary()
            found = await plan(other, should(fabric(), pipeline))
            assert found.install
            assert await other.cookie() is None
            await reconcile(primary, should(fabric(), pipeline))
            assert not await plan(other, should(fabric(), pipeline))

    run(work())


def test_refused_changes_are_named_with_table_and_field_and_the_others_are_made(switch, pipeline):
    applied(switch, pipeline, fabric())

    async def work():
        async with Session(described(switch), pipeline) as session:
            await session.become_primary()
            new = TableEntry("ipv4_route", {"ipv4_dst": (0x0A090001, 32)}, GroupRef(1))
            wrong = TableEntry("ipv4_route", {"ipv4_dst": (0x0A090002, 32)}, GroupRef(99))
            twice = TableEntry("port_trust", {"ig_port": 1}, Action("trust"))
            changes = [update("INSERT", entity) for entity in pipeline.encode(Entries(entries=(wrong, new, twice)))]
            with pytest.raises(ControlError) as refused:
                await session.write(changes)
            return str(refused.value), await session.entities()

    said, holds = run(work())
    first, second, third = said.splitlines()
    assert first == f"switch s1 at {switch.address}: it refused 2 of 3 changes:"
    assert second.startswith("  insert ipv4_route ipv4_dst=10.9.0.2 -> group 99: ")
    assert third.startswith("  insert port_trust ig_port=1 -> trust(): ALREADY_EXISTS")
    assert "ipv4_route ipv4_dst=10.9.0.1 -> group 1" in map(pipeline.describe, holds)


def test_malformed_writes_change_nothing(switch, pipeline):
    _, before = applied(switch, pipeline, fabric())
    entry = next(entity for entity in before if entity.table_entry.table_id).table_entry

    def broken(change):
        entity = p4r.Entity()
        entity.table_entry.CopyFrom(entry)
        change(entity.table_entry)
        return entity

    def wide(table_entry):
        field = table_entry.match[0]
        kind = field.WhichOneof("field_match_type")
        getattr(field, kind).value = b"\xff" * 20

    wrong = [
        p4r.Entity(),
        broken(lambda table_entry: setattr(table_entry, "table_id", 12345)),
        broken(lambda table_entry: table_entry.ClearField("match") or table_entry.match.add(field_id=77)),
        broken(wide),
        p4r.Entity(action_profile_member=p4r.ActionProfileMember(action_profile_id=7, member_id=1)),
    ]

    async def work():
        async with Session(described(switch), pipeline) as session:
            await session.become_primary()
            for entity in wrong:
                for kind in KINDS.values():
                    with pytest.raises(ControlError):
                        await session.write([update(kind.upper(), entity)])
            return await session.entities()

    assert keys(run(work())) == keys(before)


def test_who_is_not_the_primary_cannot_write(switch, pipeline):
    async def work():
        async with Session(described(switch), pipeline) as session:
            [entity] = pipeline.encode(Entries(entries=(TableEntry("port_trust", {"ig_port": 9}, Action("trust")),)))
            with pytest.raises(ControlError, match=r"s1 at .*PERMISSION_DENIED"):
                await session.write([update("INSERT", entity)])

    run(work())


def test_a_higher_bid_takes_over_and_the_lower_one_takes_its_place_again(switch, pipeline):
    async def work():
        async with Session(described(switch), pipeline, election_id=10) as first:
            await first.become_primary()
            async with Session(described(switch), pipeline, election_id=9) as lower:
                with pytest.raises(ControlError, match="with election id 10; ours is 9; stop it, or give a higher"):
                    await lower.become_primary()
            async with Session(described(switch), pipeline, election_id=20) as second:
                await second.become_primary()
                with pytest.raises(ControlError, match="another controller took over, with election id 20"):
                    await asyncio.wait_for(asyncio.shield(first.lost), 10)
                async with Session(described(switch), pipeline, election_id=15) as third:
                    waiting = asyncio.create_task(third.become_primary(stand_by=True))
                    await asyncio.sleep(0.2)  # nothing comes: that is what is tested
                    assert not waiting.done()
                    await second.close()
                    await asyncio.wait_for(waiting, 10)
                    assert await third.cookie() is None
                    await reconcile(third, should(fabric(), pipeline))

    run(work())


def test_who_bids_the_same_waits_a_moment_for_the_one_before_to_be_gone(switch, pipeline):
    async def work():
        async with Session(described(switch), pipeline) as first:
            await first.become_primary()
            async with Session(described(switch), pipeline) as second:
                waiting = asyncio.create_task(second.become_primary())
                await asyncio.sleep(ENDING_S / 4)  # the time for which it bids again is what is tested
                assert not waiting.done()
                await first.close()
                await asyncio.wait_for(waiting, 10)
                await reconcile(second, should(fabric(), pipeline))
                async with Session(described(switch), pipeline) as third:
                    with pytest.raises(
                        ControlError, match="another connection has election id 10: another controller's, or an earlier"
                    ):
                        await third.become_primary()

    run(work())


def test_a_switch_that_ends_is_noticed(switch, pipeline):
    async def work():
        async with Session(described(switch), pipeline) as session:
            await session.become_primary()
            await asyncio.to_thread(switch.restart)
            with pytest.raises(ControlError, match="switch s1 at"):
                await asyncio.wait_for(asyncio.shield(session.lost), 10)

    run(work())


def test_a_closed_session_refuses_to_read(switch, pipeline):
    """The comparison of links may still ask it."""

    async def work():
        async with Session(described(switch), pipeline) as session:
            await session.become_primary()
        with pytest.raises(ControlError, match="the connection is closed"):
            await session.entities()

    run(work())


def test_nobody_there_is_an_error_that_names_the_switch(pipeline):
    async def work():
        nowhere = FabricSwitch("s7", grpc=f"127.0.0.1:{free_port()}", insecure=True)
        async with Session(nowhere, pipeline) as session:
            with pytest.raises(ControlError, match=r"switch s7 at 127.0.0.1:\d+: no connection: .*refused"):
                await session.become_primary()
        with pytest.raises(ControlError, match="switch s8 has no control address"):
            Session(FabricSwitch("s8"), pipeline)

    run(work())


def test_somebody_who_never_answers_is_not_waited_for(pipeline):
    async def work():
        async def silent(reader, writer):
            await reader.read()  # until whoever asks gives up

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Session(
            FabricSwitch("s9", grpc=f"127.0.0.1:{port}", insecure=True), pipeline, deadline_s=0.5
        ) as session:
            with pytest.raises(ControlError, match=r"s9 at .*no answer within 0.5 s"):
                await session.become_primary()
            with pytest.raises(ControlError, match=r"s9 at .*no answer within 0.5 s"):
                await session.cookie()
        server.close()

    run(work())


def update(kind: str, entity: p4r.Entity) -> p4r.Update:
    return p4r.Update(type=kind, entity=entity)


@pytest.mark.parametrize("kind", ["builtin", "bmv2"])
def test_with_certificates_only_who_has_one_may_talk(kind, pipeline, certificates):
    async def talk(described_switch):
        async with Session(described_switch, pipeline) as session:
            await session.become_primary()
            return await reconcile(session, should(fabric(), pipeline))

    with running(kind, certificates.of_switch()) as switch:
        assert run(talk(described(switch, tls=certificates.of_controller()))).plan.install
        with pytest.raises(ControlError, match="switch s1 at"):
            run(talk(described(switch, tls=certificates.of_controller("stranger"))))
        with pytest.raises(ControlError, match="switch s1 at"):
            run(talk(described(switch)))
    missing = replace(certificates.of_controller(), key="/nowhere.key")
    with pytest.raises(ControlError, match=r"switch s1: /nowhere.key: No such file"):
        run(talk(FabricSwitch("s1", grpc="127.0.0.1:1", tls=missing)))
