"""The queue of integers as the trainer uses it (sfactory.data.queues.IndexQueue), against other ways to pass an integer
between processes.

    python -m perf.queues [--round-trips 4000] [--repeats 5] [--kills 100] [--json FILE]

- *put + get*: one message put and taken by the same process; no other process is involved.
- *round trip*: as between rollout workers and a policy worker. Each of one or two clients puts a request into the
  server's queue and waits in its own for the answer; the server takes all that waits and answers. CPU time is that of
  all processes, system time included.
- *throughput*: one or two writers put blocks of messages without pause, one reader takes what is there.
- *wedged*: a writer that puts without pause, or its reader, is killed at a random moment; another one takes its place.
  Counts the kills after which no message came through within half a second.

The queues take turns within each repeat, and medians over the repeats are shown.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from perf.channels import CHANNELS, FORK, WRITERS, Channel, EventfdRing
from perf.runs import exit_at_signals

BLOCKS = (1, 16)
WARM_UP = 200
WEDGED_S = 0.5


@dataclass(frozen=True)
class Figure:
    """One measurement of one queue: the median over the repeats.

    Attributes:
        what: put + get, round trip, or throughput in blocks of a size.
        writers: Clients or writers; 0 where one process does everything.
        microseconds: Median time of a round trip or of a put and a get; wall time per message of a throughput.
        worst_microseconds: The 99th percentile of the round trips' times; None elsewhere.
        cpu_microseconds: CPU time of all processes per message; a round trip is two messages.
    """

    queue: str
    what: str
    writers: int
    microseconds: float
    worst_microseconds: float | None
    cpu_microseconds: float


def started(main: Callable[..., None], *args: object) -> multiprocessing.process.BaseProcess:
    """A forked process that ends with this one, and by SIGTERM, also while it waits in a queue's own code."""

    def life() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        main(*args)

    process = FORK.Process(target=life, daemon=True)
    process.start()
    return process


def run_together(*mains: Callable[[], dict[str, float]]) -> list[dict[str, float]]:
    """Run functions in forked processes that begin at the same moment; their results, with `begin_s`, `end_s` and
    `cpu_s` of each added."""
    barrier = FORK.Barrier(len(mains))

    def life(main: Callable[[], dict[str, float]], results: Connection) -> None:
        barrier.wait()
        begin, cpu = time.monotonic(), time.process_time()
        result = main()
        results.send({**result, "begin_s": begin, "end_s": time.monotonic(), "cpu_s": time.process_time() - cpu})

    processes, readers = [], []
    for main in mains:
        reader, writer = FORK.Pipe(duplex=False)
        processes.append(started(life, main, writer))
        writer.close()
        readers.append(reader)
    results: dict[Connection, dict[str, float]] = {}
    while len(results) < len(readers):
        for reader in wait([reader for reader in readers if reader not in results]):
            results[reader] = reader.recv()  # an EOFError if its process has failed
    for process in processes:
        process.join()
    return [results[reader] for reader in readers]


def put_and_get(make: Callable[[], Channel], count: int) -> tuple[float, float, float]:
    """(seconds, NaN, CPU seconds) of a message that a process sends to itself."""
    channel = make()

    def pass_messages() -> dict[str, float]:
        for i in range(count):
            channel.put_many((i,))
            channel.get_many(None)
        return {}

    (result,) = run_together(pass_messages)
    return (result["end_s"] - result["begin_s"]) / count, float("nan"), result["cpu_s"] / count


def round_trips(make: Callable[[], Channel], clients: int, count: int) -> tuple[float, float, float]:
    """(median, 99th percentile) of a round trip's seconds, and CPU seconds of all processes per message."""
    requests, answers = make(), [make() for _ in range(clients)]
    total = clients * (count + WARM_UP)

    def serve() -> dict[str, float]:
        served = 0
        while served < total:
            messages = requests.get_many(None)
            served += len(messages)
            for message in messages:
                answers[message % clients].put_many((message,))
        return {}

    def client(index: int) -> dict[str, float]:
        requests.writer = index
        times = np.empty(count + WARM_UP)
        for i in range(count + WARM_UP):
            begin = time.perf_counter()
            requests.put_many((i * clients + index,))
            while not (got := answers[index].get_many(None)):
                pass
            times[i] = time.perf_counter() - begin
            if got != [i * clients + index]:
                raise RuntimeError(f"request {i * clients + index} was answered with {got}")
        return {"median": float(np.median(times[WARM_UP:])), "worst": float(np.quantile(times[WARM_UP:], 0.99))}

    server, *results = run_together(serve, *((lambda index=index: client(index)) for index in range(clients)))
    cpu = server["cpu_s"] + sum(result["cpu_s"] for result in results)
    median, worst = (statistics.mean(result[name] for result in results) for name in ("median", "worst"))
    return median, worst, cpu / (2 * total)


def throughput(make: Callable[[], Channel], writers: int, block: int, count: int) -> tuple[float, float, float]:
    """(seconds, NaN, CPU seconds) per message when writers put `count` messages each, `block` at a time."""
    channel = make()
    blocks = count // block

    def write(index: int) -> dict[str, float]:
        channel.writer = index
        values = tuple(range(block))
        for _ in range(blocks):
            channel.put_many(values)
        return {}

    def read() -> dict[str, float]:
        received = total = 0
        while received < writers * blocks * block:
            values = channel.get_many(None)
            received += len(values)
            total += sum(values)
        if total != writers * blocks * sum(range(block)):
            raise RuntimeError(f"{received} messages add up to {total}, not to {writers * blocks * sum(range(block))}")
        return {}

    results = run_together(read, *((lambda index=index: write(index)) for index in range(writers)))
    messages = writers * blocks * block
    wall = max(result["end_s"] for result in results) - min(result["begin_s"] for result in results)
    return wall / messages, float("nan"), sum(result["cpu_s"] for result in results) / messages


def measure(names: Sequence[str], trips: int, repeats: int) -> list[Figure]:
    """All figures of the named queues; within a repeat the queues take turns."""
    tasks: dict[tuple[str, int], Callable[[Callable[[], Channel]], tuple[float, float, float]]] = {
        ("put + get", 0): lambda make: put_and_get(make, trips)
    }
    for writers in range(1, WRITERS + 1):
        tasks["round trip", writers] = lambda make, writers=writers: round_trips(make, writers, trips)
        for block in BLOCKS:
            count = 5 * trips * block
            tasks[f"throughput, blocks of {block}", writers] = lambda make, w=writers, b=block, n=count: throughput(
                make, w, b, n
            )
    figures = []
    for (what, writers), task in tasks.items():
        results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        for _ in range(repeats):
            for name in names:
                results[name].append(task(CHANNELS[name]))
        for name, runs in results.items():
            typical, worst, cpu = (1e6 * statistics.median(values) for values in zip(*runs, strict=True))
            figures.append(Figure(name, what, writers, typical, worst if what == "round trip" else None, cpu))
    return figures


def wedged_by_kills(make: Callable[[], Channel], kills: int, rng: random.Random) -> int:
    """After how many kills of a writer or a reader, by turns, the queue carried no message within half a second."""

    def write(channel: Channel, value: int) -> None:
        while True:
            channel.put_many((value,))

    def read_until(channel: Channel, wanted: int) -> None:
        while wanted not in channel.get_many(None):
            pass

    wedged = 0
    for number in range(kills):
        channel, kills_writer = make(), number % 2 == 0
        writer, reader = started(write, channel, 0), started(read_until, channel, 1)
        time.sleep(rng.uniform(0.003, 0.01))
        victim = writer if kills_writer else reader
        victim.kill()
        victim.join()
        replacement = started(write, channel, 1) if kills_writer else started(read_until, channel, 0)
        survivor = reader if kills_writer else replacement
        survivor.join(WEDGED_S)
        wedged += survivor.is_alive()
        for process in (writer, reader, replacement):
            process.kill()
            process.join()
            process.close()
    return wedged


def show(figures: list[Figure], wedged: dict[str, int], kills: int) -> None:
    console = Console()
    for what in dict.fromkeys(figure.what for figure in figures):
        rates = what.startswith("throughput")
        last = "messages/s" if rates else "99 % of them, us"
        table = Table("queue", "writers", "us", "CPU us a message", last, title=what, title_justify="left")
        for figure in (figure for figure in figures if figure.what == what):
            worst = "" if figure.worst_microseconds is None else f"{figure.worst_microseconds:.1f}"
            more = f"{1e6 / figure.microseconds:,.0f}" if rates else worst
            numbers = (f"{figure.microseconds:.2f}", f"{figure.cpu_microseconds:.2f}", more)
            table.add_row(figure.queue, str(figure.writers or ""), *numbers)
        console.print(table)
    if kills:
        table = Table("queue", f"wedged, of {kills} kills")
        for name, count in wedged.items():
            table.add_row(name, str(count))
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CHANNELS, metavar="QUEUE", help=f"of: {', '.join(CHANNELS)}")
    parser.add_argument("--round-trips", type=int, default=4000, help="of each client and repeat")
    parser.add_argument("--repeats", type=int, default=5, help="0: only the kills")
    parser.add_argument("--kills", type=int, default=100, help="of each queue; 0: skip")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    exit_at_signals()
    names = args.only or list(CHANNELS)
    ring = EventfdRing()  # compiles what the forked processes inherit
    ring.put_many((0,))
    ring.get_many(None)
    figures = measure(names, args.round_trips, args.repeats) if args.repeats else []
    rng = random.Random(args.seed)
    wedged = {name: wedged_by_kills(CHANNELS[name], args.kills, rng) for name in names} if args.kills else {}
    show(figures, wedged, args.kills)
    if args.json:
        result = {"figures": [asdict(figure) for figure in figures], "kills": args.kills, "wedged": wedged}
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
