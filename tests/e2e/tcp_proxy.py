"""A TCP proxy before one daemon: it knows which process each connection belongs to, and holds back,
delays or resets bytes when a test says so, exactly at the byte that the test names."""

import asyncio
import contextlib
import os
import pathlib
import socket
import struct
import threading

UP, DOWN = "up", "down"  # towards the daemon, and back
PIECE = 1 << 16


# Of the kernel's tables of connections, the v6 one with v4 addresses mapped: gRPC's sockets are so.
TABLES = (("/proc/net/tcp", ""), ("/proc/net/tcp6", "0000000000000000FFFF0000"))


def _table_entry(address):
    host, port = address
    return f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}"


def owner_of(local, remote, pids):
    """The process among `pids`, {name: pid}, whose socket has these ends; None: of nobody there."""
    inode = None
    for table, mapped in TABLES:
        ends = [mapped + _table_entry(local), mapped + _table_entry(remote)]
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1:3] == ends:
                inode = fields[9]
    for name, pid in list(pids.items()):
        folder = f"/proc/{pid}/fd"
        # A process or a descriptor may go meanwhile.
        with contextlib.suppress(OSError):
            for entry in os.listdir(folder):
                if os.readlink(f"{folder}/{entry}") == f"socket:[{inode}]":
                    return name
    return None


class Hold:
    """Lets `after` bytes of the matching connections pass, then holds back what follows."""

    def __init__(self, proxy, who, direction, after):
        self.proxy, self.who, self.direction = proxy, who, direction
        self.left = after
        self.reached = threading.Event()
        self.released = asyncio.Event()

    def wait(self, seconds=60):
        """Until something is held back."""
        assert self.reached.wait(seconds), (
            f"nothing of {self.who} came {self.direction} through {self.proxy.address}")

    def release(self):
        """What was held back, and all that follows, goes on its way."""
        self.proxy.run(self._release())

    async def _release(self):
        self.proxy.holds.discard(self)
        self.released.set()


class Flip:
    """One byte of the matching connections, after `after` others, arrives as another."""

    def __init__(self, who, direction, after):
        self.who, self.direction, self.left = who, direction, after
        self.done = False

    def spoil(self, data):
        """Of what goes by: `data`, perhaps with the byte in it changed."""
        if self.done or len(data) <= self.left:
            self.left -= len(data)
            return data
        spoiled = bytearray(data)
        spoiled[self.left] ^= 0x55
        self.done = True
        return bytes(spoiled)


class _Link:
    """One connection: two sockets, two pumps."""

    def __init__(self, proxy, client, server):
        self.proxy = proxy
        self._who = None
        self.open = 2  # directions
        self.writers = (client[1], server[1])
        self.pumps = [asyncio.create_task(self._pump(client[0], server[1], UP)),
                      asyncio.create_task(self._pump(server[0], client[1], DOWN))]

    @property
    def who(self):
        """Whose it is; looked up when somebody wants to know."""
        if self._who is None:
            ends = (self.writers[0].get_extra_info(end)[:2] for end in ("peername", "sockname"))
            self._who = owner_of(*ends, self.proxy.pids)
        return self._who

    def _hold(self, direction):
        return next((hold for hold in self.proxy.holds
                     if hold.direction == direction and hold.who == self.who), None)

    async def _pump(self, reader, writer, direction):
        try:
            while data := await reader.read(PIECE):
                if self.proxy.delay:
                    await asyncio.sleep(self.proxy.delay)
                flip = self.proxy.flip
                if flip is not None and flip.direction == direction and flip.who == self.who:
                    data = flip.spoil(data)
                hold = self._hold(direction)
                if hold is not None and len(data) > hold.left:
                    writer.write(data[:hold.left])
                    data = data[hold.left:]
                    hold.left = 0
                    hold.reached.set()
                    await hold.released.wait()
                elif hold is not None:
                    hold.left -= len(data)
                writer.write(data)
                await writer.drain()
            writer.write_eof()
            self.open -= 1
            if self.open == 0:
                self.proxy.links.discard(self)
                for end in self.writers:
                    end.close()
        except OSError:
            self.reset()

    def reset(self):
        """Both ends get an RST; what is under way is lost."""
        for writer in self.writers:
            raw = writer.get_extra_info("socket")
            if raw is not None and raw.fileno() >= 0:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        for pump in self.pumps:
            if pump is not asyncio.current_task():
                pump.cancel()
        self.proxy.links.discard(self)


class Proxy:
    """Listens on `address` and passes on to `target`, both "host:port", on a thread of its own."""

    def __init__(self, address, target, pids):
        self.address, self.target = address, target
        self.pids = pids  # {name: pid}, read when a connection comes
        self.holds, self.links = set(), set()
        self.delay = 0.0  # seconds, of every piece
        self.flip = None  # a Flip
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        host, port = address.rsplit(":", 1)
        self.server = self.run(asyncio.start_server(self._accept, host, int(port)))

    def run(self, coroutine):
        """Does it on the proxy's thread, and waits for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    async def _accept(self, reader, writer):
        host, port = self.target.rsplit(":", 1)
        try:
            server = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self.links.add(_Link(self, (reader, writer), server))

    def hold(self, who, direction, after=0):
        """Of the process of that name, from now on."""
        hold = Hold(self, who, direction, after)

        async def arm():
            self.holds.add(hold)
        self.run(arm())
        return hold

    def reset(self, who=None):
        """All connections of that process, or of everybody."""
        async def reset():
            for link in list(self.links):
                if who is None or link.who == who:
                    link.reset()
            for hold in [hold for hold in self.holds if who is None or hold.who == who]:
                self.holds.discard(hold)
                hold.reached.set()  # there is nothing to wait for any more
                hold.released.set()
        self.run(reset())

    def close(self):
        """No connection is left."""
        self.reset()

        async def close():
            self.server.close()
        self.run(close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()
