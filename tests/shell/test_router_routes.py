"""Which engine a request reaches, under which name and by which path, over HTTP with fake engines."""

from __future__ import annotations

from support.fronts import fronted


async def test_each_leg_names_the_data_parallel_rank_that_was_chosen() -> None:
    """R17: ranks of one engine share a port; a client does not choose among them."""
    async with fronted("P", "D") as front:
        front.beat("P", 2, data_parallel=True, data_parallel_rank=3)
        front.beat("D", 2, requests=9)
        front.beat("E", like="D", data_parallel=True, data_parallel_rank=1)
        await front.knows("P", "D", "E")
        answer = await front.ask(headers={"x-Data-Parallel-Rank": "7"})
        assert answer.headers["X-KVBus-Decode"] == "E"
        assert [headers.get("x-data-parallel-rank") for _, _, headers in front["P"].requests] == ["3"]
        assert [headers.get("x-data-parallel-rank") for _, _, headers in front["D"].requests] == ["1"]
        front.beat("E", 2, like="D", requests=9, data_parallel=True, data_parallel_rank=1)
        front.beat("D", 3)
        await front.knows("P", "D", "E")
        assert (await front.ask()).headers["X-KVBus-Decode"] == "D"
        assert "x-data-parallel-rank" not in front["D"].requests[1][2]
