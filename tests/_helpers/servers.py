"""Real servers on localhost: ``mlflow server``, ``mlflow models serve`` and PostgreSQL."""

from __future__ import annotations

import contextlib
import glob
import http.client
import http.server
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SECRET = "hunter2"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


class Program:
    """An mlflow server that answers on ``/health`` once it is up."""

    def __init__(self, arguments: Sequence[str], folder: Path, port: int, environment: Mapping[str, str]) -> None:
        self.port = port
        self.uri = f"http://127.0.0.1:{port}"
        self.log = folder / f"server-{port}.log"
        # mlflow starts other programs by name, so they must be on the PATH.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", *arguments, "--host", "127.0.0.1", "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
                env={**os.environ, "PATH": path, **environment},
            )
        self._wait()

    def _wait(self) -> None:
        for _ in range(1200):
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=1):
                    return
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()}")

    def stop(self) -> None:
        """Kills the server and its workers at once, as a crash would."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Server(Program):
    """An ``mlflow server`` with runs and files on disk. Another server on the same folder continues with them."""

    def __init__(self, folder: Path, store: str, port: int | None = None) -> None:
        self.folder, self.store = folder, store
        arguments = ["server", "--workers", "1", "--backend-store-uri", store]
        arguments += ["--artifacts-destination", str(folder / "artifacts")]
        # With job execution, a server starts seven more processes, which these tests do not need.
        super().__init__(arguments, folder, port or free_port(), {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})

    def restarted(self) -> Server:
        self.stop()
        return Server(self.folder, self.store, self.port)


@contextlib.contextmanager
def answering(status: int, body: str = "", **headers: str) -> Iterator[str]:
    """Serves one status and text as the answer to every call, and yields the URI."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *body: object) -> None:
            pass

        def answer(self) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content_Length": str(len(body))}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = answer  # noqa: N815 - the names of http.server

    with _served(Handler) as uri:
        yield uri


@contextlib.contextmanager
def _served(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Lossy:
    """A proxy that forwards all calls, but drops the first answer to each kind of writing call.

    Args:
        signing_on: If set, drops no answer. Uploads to paths that match it get an HTML page and are not forwarded.

    Attributes:
        lost: The kinds of calls with a dropped answer, in order, without ids.
    """

    def __init__(self, signing_on: str | None = None) -> None:
        self.lost: list[str] = []
        self.signing_on = signing_on

    @contextlib.contextmanager
    def to(self, port: int) -> Iterator[str]:
        """Serves until the block ends, and yields the URI."""
        lost, signing_on = self.lost, self.signing_on

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *body: object) -> None:
                pass

            def forward(self) -> None:
                if self.headers.get("Transfer-Encoding") == "chunked":
                    body = b"".join(self.chunks())
                else:
                    body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if signing_on is not None and self.command == "PUT" and re.search(signing_on, self.path):
                    self.tell(200, b"<html>Please sign on.</html>")
                    return
                own = ("host", "content-length", "transfer-encoding", "connection")
                server = http.client.HTTPConnection("127.0.0.1", port)
                headers = {key: value for key, value in self.headers.items() if key.lower() not in own}
                server.request(self.command, self.path, body, headers)
                answer = server.getresponse()
                body = answer.read()
                server.close()
                kind = re.sub(r"[0-9a-f]{32}|(?<=artifacts/artifacts/).*", "ID", self.path.partition("?")[0])
                # mlflow sends searches as POST too.
                if signing_on is None and self.command != "GET" and "search" not in kind and kind not in lost:
                    lost.append(kind)
                    self.close_connection = True
                    return
                self.tell(
                    answer.status, body, [header for header in answer.getheaders() if header[0].lower() not in own]
                )

            def tell(self, status: int, body: bytes, headers: Sequence[tuple[str, str]] = ()) -> None:
                self.send_response(status)
                for key, value in [*headers, ("Content-Length", str(len(body)))]:
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(body)

            def chunks(self) -> Iterator[bytes]:
                while size := int(self.rfile.readline(), 16):
                    yield self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = forward  # noqa: N815 - the names of http.server

        with _served(Handler) as uri:
            yield uri


def serving(model: str, tracking_uri: str, folder: Path) -> Program:
    """Starts ``mlflow models serve`` for a registered model."""
    arguments = ["models", "serve", "--model-uri", model, "--env-manager", "local"]
    return Program(arguments, folder, free_port(), {"MLFLOW_TRACKING_URI": tracking_uri})


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """Starts a PostgreSQL cluster with a password, and yields the URI of its database."""
    candidates = [shutil.which("pg_ctl") or "", *sorted(glob.glob("/usr/lib/postgresql/*/bin/pg_ctl"))]
    programs = Path(next(path for path in reversed(candidates) if path)).parent
    target = Path(tempfile.mkdtemp(prefix="optexport-postgresql-"))
    port, as_root = free_port(), os.geteuid() == 0
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"

    def call(program: str, *arguments: str) -> None:
        # PostgreSQL refuses to run as root.
        user: dict[str, Any] = {"user": "postgres", "group": "postgres", "extra_groups": []} if as_root else {}
        log = target / "call.log"
        with log.open("ab") as output:
            done = subprocess.run(
                [str(programs / program), *arguments], stdout=output, stderr=output, cwd=target, check=False, **user
            )
        assert done.returncode == 0, log.read_text()

    try:
        (target / "password").write_text(SECRET)
        if as_root:
            postgres = pwd.getpwnam("postgres")
            for path in (target, target / "password"):
                os.chown(path, postgres.pw_uid, postgres.pw_gid)
        data = str(target / "data")
        call("initdb", "-D", data, "-U", "optexport", "--auth=scram-sha-256", f"--pwfile={target / 'password'}")
        call("pg_ctl", "-D", data, "-w", "-l", str(target / "log"), "-o", options, "start")
        try:
            yield f"postgresql+psycopg2://optexport:{SECRET}@127.0.0.1:{port}/postgres"
        finally:
            call("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(target)


@contextlib.contextmanager
def falling_silent(uri: str, count: int) -> Iterator[str]:
    """Proxies a server, and stops forwarding after ``count`` bytes without closing the connections."""
    host, port = re.search(r"@([\d.]+):(\d+)", uri).groups()  # type: ignore[union-attr]
    byte_count, is_over = 0, threading.Event()

    def pump(source: socket.socket, target: socket.socket, *, counted: bool) -> None:
        nonlocal byte_count
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                byte_count += len(data) * counted
                if byte_count > count:
                    is_over.wait()
                    return
                target.sendall(data)

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            while True:
                client = stack.enter_context(listening.accept()[0])
                server = stack.enter_context(socket.create_connection((host, int(port))))
                for source, target in ((client, server), (server, client)):
                    threading.Thread(
                        target=pump, args=(source, target), kwargs={"counted": source is client}, daemon=True
                    ).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        try:
            yield uri.replace(f":{port}/", f":{listening.getsockname()[1]}/")
        finally:
            is_over.set()
            listening.shutdown(socket.SHUT_RDWR)
