"""A network of its own for a test: namespaces on one bridge, where packets can be lost; and a name
server that knows one name. Needs root, iproute2 and nftables."""

import itertools
import os
import pathlib
import re
import shutil
import socket
import struct
import subprocess
import threading

_numbers = itertools.count()


def missing():
    """Why there can be no namespaces here; empty: there can."""
    for tool in ("ip", "nft"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    name = f"mt{os.getpid()}"
    for command in (["ip", "netns", "add", name],
                    ["ip", "netns", "exec", name, "nft", "list", "ruleset"]):
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        if tried.returncode != 0:
            return f"{' '.join(command)}: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def _do(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


class Network:
    """`count` hosts, each a namespace with one address; this process is `gateway`."""

    def __init__(self, test, count):
        number = next(_numbers)
        self.name = f"m{os.getpid()}x{number}"
        self.net = f"10.{1 + os.getpid() // 250 % 250}.{os.getpid() % 250}"
        self.gateway = f"{self.net}.254"
        self.addresses = [f"{self.net}.{1 + host}" for host in range(count)]
        self.namespaces = [f"{self.name}h{host}" for host in range(count)]
        test.addCleanup(self.close)
        _do("ip", "link", "add", self.name, "type", "bridge")
        _do("ip", "address", "add", f"{self.gateway}/24", "dev", self.name)
        _do("ip", "link", "set", self.name, "up")
        for host, (namespace, address) in enumerate(zip(self.namespaces, self.addresses)):
            inside, outside = f"{self.name}i{host}", f"{self.name}o{host}"
            _do("ip", "netns", "add", namespace)
            _do("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
            _do("ip", "link", "set", outside, "master", self.name, "up")
            _do("ip", "link", "set", inside, "netns", namespace)
            _do("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", inside)
            _do("ip", "-n", namespace, "link", "set", inside, "up")
            _do("ip", "-n", namespace, "link", "set", "lo", "up")

    def prefix(self, host):
        """Before a command: it runs there."""
        return ("ip", "netns", "exec", self.namespaces[host])

    def lose(self, host, per_mille):
        """So many of a thousand packets that come to the host or leave it, at random; 1000 cuts it
        off, 0 heals it."""
        rules = "flush ruleset\n"
        if per_mille:
            rules += "table inet loss {\n" + "".join(
                f"chain {hook} {{ type filter hook {hook} priority 0; "
                f"meta oifname != \"lo\" meta iifname != \"lo\" "
                f"numgen random mod 1000 >= {1000 - per_mille} counter drop; }}\n"
                for hook in ("input", "output")) + "}\n"
        subprocess.run([*self.prefix(host), "nft", "-f", "-"], input=rules, text=True, check=True)

    def lost(self, host):
        """Packets that were lost there since `lose`."""
        rules = subprocess.run([*self.prefix(host), "nft", "list", "ruleset"], check=True,
                               capture_output=True, text=True).stdout
        return sum(map(int, re.findall(r"counter packets (\d+)", rules)))

    def name_server(self, host):
        """The host's resolver asks the gateway from now on."""
        folder = pathlib.Path("/etc/netns") / self.namespaces[host]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "resolv.conf").write_text(f"nameserver {self.gateway}\n")

    def close(self):
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
            shutil.rmtree(pathlib.Path("/etc/netns") / namespace, ignore_errors=True)
        subprocess.run(["ip", "link", "del", self.name], check=False, capture_output=True)


class NameServer:
    """Answers A questions for one name, with `addresses`, in another order each time, and all other
    questions with nothing, as a headless service's name server does."""

    def __init__(self, test, address, name, addresses):
        self.name, self.addresses = name, list(addresses)
        self.asked = 0
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((address, 53))
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        test.addCleanup(self.close)

    def _serve(self):
        while True:
            question, client = self.socket.recvfrom(512)
            if not question:
                return
            self.socket.sendto(self._answer(question), client)

    def _answer(self, query):
        end = query.index(b"\0", 12) + 5  # of the only question: name, type, class
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1:at + 1 + query[at]].decode())
            at += 1 + query[at]
        kind = struct.unpack("!H", query[end - 4:end - 2])[0]
        records = b""
        count = 0
        if ".".join(labels) == self.name and kind == 1:
            turn = self.asked % max(len(self.addresses), 1)
            self.asked += 1
            for address in self.addresses[turn:] + self.addresses[:turn]:
                records += struct.pack("!HHHIH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton(address)
                count += 1
        return query[:2] + struct.pack("!HHHHH", 0x8180, 1, count, 0, 0) + query[12:end] + records

    def close(self):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", self.socket.getsockname())
        self.thread.join(60)
        self.socket.close()
