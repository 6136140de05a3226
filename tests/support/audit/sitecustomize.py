"""On PYTHONPATH: each Python process leaves word of what it did that a way in could be made of.

A line of JSON each: classes and functions that a pickle asked for, ports that Python itself opened, shells.
"""

import json
import os
import sys

_FILE = os.environ.get("AUDIT_FILE")


def _seen(event, arguments):  # type: ignore[no-untyped-def]
    if event == "pickle.find_class":
        what = list(map(str, arguments))
    elif event == "socket.bind" and isinstance(arguments[1], tuple):
        what = [str(arguments[1][0])]
    elif event == "os.system" or (event == "subprocess.Popen" and "sh" in str(arguments[0]).split("/")[-1:]):
        what = [repr(arguments[:2])]
    else:
        return
    line = json.dumps({"event": event, "what": what, "pid": os.getpid(), "argv": sys.argv[:3]}) + "\n"
    file = os.open(_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


if _FILE:
    sys.addaudithook(_seen)
