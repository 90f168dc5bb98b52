"""A switch in user space: it joins the interfaces of virtual hosts at a rate, with delay and loss.

    python switch.py RATE DELAY LOSS INTERFACE...      bits/s (0: no limit), seconds, a fraction

It is for kernels without ``netem``. It makes the interfaces, prints a line, and ends with its standard input. Frames of
up to 64 KiB pass whole unless some are to be lost; their time on the cable counts the headers of all their packets.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

# From linux/if_tun.h and linux/prctl.h. Each frame begins with a virtio_net_hdr of 10 bytes.
TUNSETIFF, TUNSETOFFLOAD, TAP_WITH_HEADERS, TSO = 0x400454CA, 0x400454D0, 0x5002, 3
HEADER, PER_PACKET, FRAMING, MAC, PR_SET_TIMERSLACK = 10, 66, 24, 6, 29
LONGEST = 1 << 17
"""Bytes of a frame, at most."""
QUEUE = 0.02
"""Seconds that a frame waits for its turn on the cable, at most; later ones are dropped. At least 2 MiB wait."""


def make_interface(name: str, loss: float) -> int:
    port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(port, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_WITH_HEADERS))
    fcntl.ioctl(port, TUNSETOFFLOAD, 0 if loss else TSO)
    return port


def switch(names: list[str], rate: float, delay: float, loss: float) -> None:
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000)  # in ns; the usual 50 us would add to the delay
    ports = [make_interface(name, loss) for name in names]
    known: dict[bytes, int] = {}
    leaves, arrives = dict.fromkeys(ports, 0.0), dict.fromkeys(ports, 0.0)
    coming: list[tuple[float, int, int, bytes]] = []
    longest = max(QUEUE, (2 << 20) * 8 / rate) if rate else 0.0
    number, numbers = 0, random.Random(0)
    print("ready", flush=True)
    while True:
        timeout = max(0.0, coming[0][0] - time.monotonic()) if coming else None
        readable, _, _ = select.select([*ports, 0], [], [], timeout)
        if 0 in readable:
            return
        for port in readable:
            try:
                frame, now = os.read(port, LONGEST), time.monotonic()
            except BlockingIOError:
                continue
            to, known[frame[HEADER + MAC : HEADER + 2 * MAC]] = frame[HEADER : HEADER + MAC], port
            (segment,) = struct.unpack_from("H", frame, 4)
            packets = -(-len(frame) // segment) if segment else 1
            seconds = (len(frame) + packets * (PER_PACKET if segment else FRAMING)) * 8 / rate if rate else 0.0
            begins = max(now, leaves[port])
            if begins - now > longest and rate:
                continue
            leaves[port] = begins + seconds
            for target in [known[to]] if to in known else [each for each in ports if each != port]:
                if numbers.random() >= loss:
                    # One frame at a time comes in, too, whoever sends it.
                    ends = arrives[target] = max(begins, arrives[target]) + seconds
                    number += 1
                    heapq.heappush(coming, (ends + delay, number, target, frame))
        while coming and coming[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(coming)
            try:
                os.write(target, frame)
            except OSError:  # the host has cut its cable
                continue


if __name__ == "__main__":
    switch(sys.argv[4:], *map(float, sys.argv[1:4]))
