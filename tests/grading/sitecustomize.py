"""What is different for a script while `make grade` looks at it.

Python imports a module of this name, if it finds one, before it runs any script; grade.py puts this
one on the path. It does three things, and none without QR_GRADE in the environment:

1. Every connection to port 6379, of whatever host, leads to the grader's private Redis; so does one
   to the unix socket of a Redis. Any other port is refused, so that nobody's Redis is touched.
2. `time.sleep(8)` takes 8 / FASTER seconds. Clocks and blocking commands of Redis stay as they are.
3. The learner's own folder can be read, but nothing in it can be written, renamed or removed.
"""

import json
import os
import socket
import sys
import time

REDIS_PORT = 6379
CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}


def lead_to(private_port, private_socket):
    """Wraps the functions through which every connection of Python goes."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex
    look_up = socket.getaddrinfo

    def private(sock, address):
        if sock.family == socket.AF_UNIX:
            redis = "redis" in str(address) or "valkey" in str(address)
            return private_socket if redis else address
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return address
        if address[1] not in (REDIS_PORT, private_port):
            raise ConnectionRefusedError(
                f"while it is graded, a script can reach Redis on port {REDIS_PORT} or where "
                f"REDIS_URL says, and not {address[0]} port {address[1]}"
            )
        here = "127.0.0.1" if sock.family == socket.AF_INET else "::ffff:127.0.0.1"
        return (here, private_port)

    def getaddrinfo(host, port, *more, **named):
        """The name of a Redis elsewhere need not be known here."""
        if str(port) in (str(REDIS_PORT), str(private_port)):
            host = "127.0.0.1"
        return look_up(host, port, *more, **named)

    socket.socket.connect = lambda sock, address: connect(sock, private(sock, address))
    socket.socket.connect_ex = lambda sock, address: connect_ex(sock, private(sock, address))
    socket.getaddrinfo = getaddrinfo


def hurry(faster):
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(seconds / faster)


def keep_out_of(folders, private):
    """An audit hook hears of every file that Python opens for writing, moves or removes."""
    roots = tuple(folder.rstrip("/") + "/" for folder in folders)

    def look(event, arguments):
        if event == "open":
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR)
            paths = arguments[:1] if writes else ()
        else:
            paths = arguments[:2] if event in CHANGES else ()
        for path in paths:
            if isinstance(path, (str, bytes)) and within(os.fsdecode(path)):
                raise PermissionError(f"while it is graded, a script cannot change {path!r}")

    def within(path):
        whole = os.path.abspath(path) + "/"
        return whole.startswith(roots) and not whole.startswith(private + "/")

    sys.addaudithook(look)


if "QR_GRADE" in os.environ:
    rules = json.loads(os.environ["QR_GRADE"])
    lead_to(rules["port"], rules["socket"])
    hurry(rules["faster"])
    keep_out_of(rules["keep_out_of"], rules["but_not_of"])
