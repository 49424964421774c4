"""A small server on loopback that speaks as much of the Hub's protocol as push and from_pretrained need.

The real client talks to it through HF_ENDPOINT. It keeps everything in memory: repositories are lists
of commits, large files lie in a store of their own and are served through a redirect, as on the Hub.
It notes every request, and can be told to fail.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_loopback_write_token"
READ_TOKEN = "hf_loopback_read_token"
USER = "alice"


@dataclass
class Commit:
    oid: str
    message: str
    files: dict[str, bytes]
    # Names of those that came through large-file storage.
    large: set[str]


@dataclass
class Repo:
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    # Names that its .gitignore covers.
    ignored: set[str] = field(default_factory=set)
    # Its files are for those who accepted its terms; here, nobody.
    gated: bool = False

    def at(self, revision: str) -> Commit | None:
        return self.commits.get(self.branches.get(revision, revision))

    def add(self, branch: str, message: str, files: dict[str, bytes], large: set[str]) -> Commit:
        content = json.dumps([branch, message, len(self.commits), sorted(files)]).encode()
        commit = Commit(hashlib.sha1(content).hexdigest(), message, files, large)
        self.commits[commit.oid] = commit
        self.branches[branch] = commit.oid
        return commit


class Hub:
    """The state behind the server."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.store: dict[str, bytes] = {}
        self.requests: list[str] = []
        # "METHOD path" patterns → status of the next requests that match, and how many of them.
        self.failures: dict[str, tuple[int, int]] = {}
        self.url = ""

    def create(self, name: str, private: bool = False) -> Repo:
        repo = self.repos[name] = Repo(private)
        repo.add("main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"}, set())
        return repo

    def fail(self, pattern: str, status: int, times: int = 1) -> None:
        self.failures[pattern] = (status, times)

    def planned_failure(self, request: str) -> int | None:
        for pattern, (status, times) in self.failures.items():
            if times > 0 and re.search(pattern, request):
                self.failures[pattern] = (status, times - 1)
                return status
        return None


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: Any) -> None:
        pass

    def reply(self, status: int, content: Any = None, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content if content is not None else {}).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str = "", message: str = "") -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply(status, {"error": message}, **headers)

    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self) -> None:
        split = urlsplit(self.path)
        self.query = parse_qs(split.query)
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(self.chunks())
        else:
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = f"{self.command} {unquote(split.path)}"
        self.hub.requests.append(request)
        status = self.hub.planned_failure(request)
        if status is not None:
            return self.refuse(status, message="planned failure")
        for pattern, method in ROUTES:
            match = re.fullmatch(pattern, f"{self.command.replace('HEAD', 'GET')} {split.path}")
            if match:
                return method(self, **{name: unquote(value) for name, value in match.groupdict().items() if value})
        return self.refuse(404, message=f"no route for {request}")

    def chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def repo(self, name: str, write: bool = False) -> Repo | None:
        """The repository, or None after having refused."""
        found = self.hub.repos.get(name)
        if found is None or (found.private and self.token() not in (TOKEN, READ_TOKEN)):
            self.refuse(404, "RepoNotFound", "Repository not found")
            return None
        if write and self.token() != TOKEN:
            self.refuse(403, message="no write access")
            return None
        return found

    def whoami(self) -> None:
        role = {TOKEN: "write", READ_TOKEN: "read"}.get(self.token() or "")
        if role is None:
            return self.refuse(401, message="Invalid credentials in Authorization header")
        orgs = [{"name": "lab", "type": "org", "roleInOrg": "write"}]
        return self.reply(200, {"type": "user", "name": USER, "orgs": orgs, "auth": {"accessToken": {"role": role}}})

    def create_repo(self) -> None:
        if self.token() != TOKEN:
            return self.refuse(401, message="no write access")
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        if name in self.hub.repos:
            return self.reply(409, {"error": "exists", "url": f"{self.hub.url}/{name}"})
        self.hub.create(name, bool(asked.get("private")) or asked.get("visibility") == "private")
        return self.reply(200, {"url": f"{self.hub.url}/{name}", "id": name, "name": name})

    def validate_yaml(self) -> None:
        content = json.loads(self.body)["content"]
        if "license: no-such-license" in content:
            return self.reply(400, {"errors": [{"message": '"license" must be one of those known'}], "warnings": []})
        return self.reply(200, {"errors": [], "warnings": []})

    def create_branch(self, repo: str, revision: str) -> None:
        found = self.repo(repo, write=True)
        if found is None:
            return None
        if revision in found.branches:
            return self.refuse(409, message="Reference already exists")
        found.branches[revision] = found.branches["main"]
        return self.reply(200)

    def model_info(self, repo: str, revision: str = "main") -> None:
        found = self.repo(repo)
        if found is None:
            return None
        commit = found.at(revision)
        if commit is None:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        siblings = [{"rfilename": name} for name in commit.files]
        info = {"_id": "0" * 24, "id": repo, "modelId": repo, "sha": commit.oid, "private": found.private}
        return self.reply(200, {**info, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0, "gated": False})

    def tree(self, repo: str, revision: str, path: str = "") -> None:
        found = self.repo(repo)
        if found is None:
            return None
        commit = found.at(revision)
        if commit is None:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        entries = []
        for name, content in commit.files.items():
            if not name.startswith(f"{path}/" if path else ""):
                continue
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": git_oid(content)}
            if name in commit.large:
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        if path and not entries:
            return self.refuse(404, "EntryNotFound", "no such folder")
        return self.reply(200, entries)

    def preupload(self, repo: str, revision: str) -> None:
        found = self.repo(repo, write=True)
        if found is None:
            return None
        if revision not in found.branches:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        commit = found.at(revision)
        assert commit is not None
        files = []
        for asked in json.loads(self.body)["files"]:
            name = asked["path"]
            answer = {"path": name, "shouldIgnore": name in found.ignored}
            answer["uploadMode"] = "lfs" if name.endswith((".safetensors", "tokenizer.json")) else "regular"
            if name in commit.files:
                content = commit.files[name]
                answer["oid"] = hashlib.sha256(content).hexdigest() if name in commit.large else git_oid(content)
            files.append(answer)
        return self.reply(200, {"files": files})

    def lfs_batch(self, repo: str) -> None:
        if self.repo(repo, write=True) is None:
            return None
        objects = []
        for asked in json.loads(self.body)["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.store:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/store/{asked['oid']}?signature=secret"}}
            objects.append(answer)
        return self.reply(200, {"transfer": "basic", "objects": objects})

    def store_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.refuse(400, message="other content than announced")
        self.hub.store[oid] = self.body
        return self.reply(200)

    def store_get(self, oid: str) -> None:
        return self.reply(200, self.hub.store[oid], ETag=f'"{oid}"')

    def commit(self, repo: str, revision: str) -> None:
        found = self.repo(repo, write=True)
        if found is None:
            return None
        parent = found.at(revision)
        if revision not in found.branches or parent is None:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        files, large, message = dict(parent.files), set(parent.large), ""
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                message = value["summary"]
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
                large.discard(value["path"])
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.hub.store:
                    return self.refuse(400, message="large file was never uploaded")
                files[value["path"]] = self.hub.store[value["oid"]]
                large.add(value["path"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
                large.discard(value["path"])
            else:
                return self.refuse(400, message=f"unknown operation {operation['key']}")
        answer: dict[str, Any] = {"success": True}
        branch = revision
        if self.query.get("create_pr"):
            number = 1 + sum(name.startswith("refs/pr/") for name in found.branches)
            branch = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.url}/{repo}/discussions/{number}"
        commit = found.add(branch, message, files, large)
        return self.reply(
            200, {**answer, "commitOid": commit.oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{commit.oid}"}
        )

    def resolve(self, repo: str, revision: str, path: str) -> None:
        found = self.repo(repo)
        if found is None:
            return None
        if found.gated:
            return self.refuse(403, "GatedRepo", "Access to this model is restricted")
        commit = found.at(revision)
        if commit is None:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        if path not in commit.files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit.oid}
            return self.reply(404, {"error": "Entry not found"}, **headers)
        content = commit.files[path]
        if path not in commit.large:
            return self.reply(200, content, ETag=f'"{git_oid(content)}"', X_Repo_Commit=commit.oid)
        sha256 = hashlib.sha256(content).hexdigest()
        self.hub.store[sha256] = content
        linked = {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(content)), "X-Repo-Commit": commit.oid}
        # To another host, as the Hub sends downloads to its delivery network.
        elsewhere = self.hub.url.replace("127.0.0.1", "localhost")
        return self.reply(302, b"", Location=f"{elsewhere}/store/{sha256}?signature=secret", **linked)


REPO = r"(?P<repo>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES: list[tuple[str, Callable[..., None]]] = [
    (r"GET /api/whoami-v2", Handler.whoami),
    (r"POST /api/repos/create", Handler.create_repo),
    (r"POST /api/validate-yaml", Handler.validate_yaml),
    (rf"POST /api/models/{REPO}/branch/{REVISION}", Handler.create_branch),
    (rf"POST /api/models/{REPO}/preupload/{REVISION}", Handler.preupload),
    (rf"POST /api/models/{REPO}/commit/{REVISION}", Handler.commit),
    (rf"GET /api/models/{REPO}/tree/{REVISION}(?:/(?P<path>.+))?", Handler.tree),
    (rf"GET /api/models/{REPO}(?:/revision/{REVISION})?", Handler.model_info),
    (rf"POST /{REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (r"PUT /store/(?P<oid>[0-9a-f]+)", Handler.store_put),
    (r"GET /store/(?P<oid>[0-9a-f]+)", Handler.store_get),
    (rf"GET /(?:datasets/)?{REPO}/resolve/{REVISION}/(?P<path>.+)", Handler.resolve),
]


@contextmanager
def serve() -> Iterator[Hub]:
    """Run a fresh Hub on a free port of loopback."""
    hub = Hub()
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
