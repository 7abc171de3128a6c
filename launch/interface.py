"""How this node reaches another: `python launch/interface.py HOST [INTERFACE]` prints address, interface, and 1 or 0.

The interface is the one that the route to HOST takes, unless it is given; the address is its own, and warned of if it
is public; 1 where HOST is this node.  Standard library only, no lookup of this host's own name: on clusters that often
fails, or gives a loopback.
"""

import fcntl
import ipaddress
import socket
import struct
import sys

SIOCGIFADDR = 0x8915


def addresses() -> dict[str, str]:
    """IPv4 address of every interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def reach(host: str, interface: str = "") -> tuple[str, str, bool]:
    """Address, interface, and whether `host` is this node; ValueError where there is no way."""
    here = addresses()
    try:
        there = socket.gethostbyname(host)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((there, 9))  # sends nothing
            source = sock.getsockname()[0]
    except OSError as error:
        raise ValueError(f"MASTER = {host!r} cannot be reached from here: {error}") from error
    if not interface:  # a node reaches itself from the very address
        interface = next((name for name, address in here.items() if address == source), "")
    if interface not in here:
        raise ValueError(f"IFACE = {interface!r}: interfaces with an IPv4 address are {', '.join(sorted(here))}")
    return here[interface], interface, there in here.values()


def warning(address: str, interface: str) -> str:
    """A line where others than the nodes of a private network may reach the ranks; "" where they may not."""
    if not ipaddress.ip_address(address).is_global:
        return ""
    return (
        f"warning: ranks listen at {address} ({interface}), a public address: whoever reaches it can run code in this "
        "job. Set IFACE to an interface of a private network\n"
    )


if __name__ == "__main__":
    try:
        address, name, itself = reach(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    sys.stderr.write(warning(address, name))
    print(address, name, int(itself))
