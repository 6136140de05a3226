"""``python -m hvdtrain.launch.own_task PROGRAM``: run PROGRAM as a rank of hvdtrain's own driver, not elastic.

The program needs no knowledge of the driver: it finds its place in the environment, as under ``horovodrun --gloo``.
This process talks to the driver, forwards signals to the program, and ends it when another rank is lost.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from hvdtrain.errors import CANNOT_START, USAGE, LaunchError
from hvdtrain.programs import wait_with_signals
from hvdtrain.runtime.channel import LIFELINE, VARIABLE
from hvdtrain.runtime.driver_client import NoPlace, connect_to_driver
from hvdtrain.runtime.environment import environ
from hvdtrain.runtime.interfaces import refuse_without_address

_NOT_FOR_IT = (VARIABLE, LIFELINE, "HOROVOD_ELASTIC")


def main(program: Sequence[str]) -> int:
    """Run the program and return its exit code, 128 + number where a signal ended it."""
    now = environ()
    client = connect_to_driver(now)
    if client is None:
        return _say("hvdtrain's driver did not start this process; use hvdtrain launch --to hvdtrain", USAGE)
    received: list[signal.Signals] = []
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: object) -> None:
        received.append(signal.Signals(number))
        if process is not None:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, forward)
    try:
        given = client.join("started").variables()
        refuse_without_address(given)
    except NoPlace:
        return 0  # the driver has reported the reason
    except LaunchError as error:
        return _say(str(error), USAGE)
    environment = {**now, **given, **dict.fromkeys(_NOT_FOR_IT)}
    try:
        process = subprocess.Popen(list(program), env={k: v for k, v in environment.items() if v is not None})
    except OSError as error:
        return _say(f"{program[0]} cannot be started: {error.strerror}", CANNOT_START)
    for number in received:  # from before the start
        process.send_signal(number)
    client.wake = process.terminate
    if client.is_broken():
        process.terminate()
    code = wait_with_signals(process)
    if code == 0:
        client.report_leaving("finished")
    elif received and code == 128 + received[-1]:
        client.report_leaving(received[-1].name)
    return code


def _say(text: str, code: int) -> int:
    sys.stderr.write(f"hvdtrain.launch.own_task: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
