"""Putting a baked directory on the Hub: verified first, in one commit, and nothing but the checkpoint.

The order is: everything that can be refused at once (the name, the login, the right to write, the
card), then the verification, then the upload. Until the one commit at the end the repository is as
it was, so a broken upload is mended by running it again: what has arrived is not sent twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lpes_bake.card import auto_class
from lpes_bake.search.errors import InputError
from lpes_bake.source import WEIGHT_SUFFIXES, Source, architecture_of, open_source, weight_files
from lpes_bake.verify import (
    ADAPTER_FILES,
    Doing,
    LiveSettings,
    Notify,
    Report,
    is_hidden,
    static_checks,
    validate_card,
    verify,
)

# Kinds of files that a checkpoint is made of, besides its weights and Python files. Whatever else lies
# in the directory (journals, logs, notebooks, archives) stays here.
# fmt: off
SENT_SUFFIXES = frozenset({
    ".json", ".jinja", ".txt", ".md", ".rst", ".model", ".tiktoken", ".spm", ".bpe", ".vocab", ".merges", ".yaml",
    ".yml", ".toml", ".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp", ".pdf",
})
# fmt: on
SENT_NAMES = re.compile(r"(licen[cs]e|notice|copying|copyright|use_policy|tokenizer\.model)\b.*", re.IGNORECASE)

ACCESS_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b")


@dataclass(frozen=True)
class Pushed:
    """What a push did.

    repo: namespace/name. commit: its full hash. files: what the repository got. left_out: what was in
    the directory and was not sent. removed: what an earlier push left in the repository and loaders
    would have taken for part of this model. pull_request: its address, with create_pr.
    """

    repo: str
    commit: str
    url: str
    auto_class: str
    files: list[str]
    left_out: list[str]
    removed: list[str]
    pull_request: str | None

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    def loading_lines(self) -> str:
        """The Python that loads exactly what was pushed."""
        return (
            f"from transformers import {self.auto_class}, AutoTokenizer\n"
            f'revision = "{self.commit}"\n'
            f'model = {self.auto_class}.from_pretrained("{self.repo}", revision=revision, trust_remote_code=True)\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{self.repo}", revision=revision, trust_remote_code=True)'
        )


class NotVerified(Exception):
    """The directory failed its verification, so nothing was sent."""

    def __init__(self, report: Report) -> None:
        super().__init__("nothing was sent: the directory did not pass its verification")
        self.report = report


def push(
    directory: Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str | None = None,
    base: Source | None = None,
    live: LiveSettings | None = None,
    notify: Notify = lambda check: None,
    doing: Doing = lambda what: None,
) -> Pushed:
    """Verify a baked directory and send it to the Hub in one commit.

    repo: "name" or "namespace/name"; it is created when it is not there. revision: the branch, created
    when it is not there; None is the main one. create_pr: open a pull request instead. live: how to
    verify; None reads files only. doing gets "" when the upload starts, which shows its own progress.
    Raises InputError, or NotVerified before anything is sent.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    # Reads config.json and the weights' headers: what is no checkpoint ends here.
    quick = Report(str(directory), None, list(static_checks(directory, None)))
    if not quick.ok:
        for check in quick.checks:
            notify(check)
        raise NotVerified(quick)
    files, left_out = checkpoint_files(directory)
    check_secrets(directory, files)
    check_card(directory, repo)
    api = HfApi(library_name="lpes-bake")
    doing("asking the Hub")
    repo, exists = check_account(api, repo, private, create_pr)
    check_card(directory, repo)  # again, now that a bare name has its namespace
    check_card_on_hub(api, directory)
    present = list_branch(api, repo, revision) if exists else None
    leftovers = stale_files(present or [], files)

    report = verify(directory, base, live=live, notify=notify, doing=doing)
    if not report.ok:
        raise NotVerified(report)

    source = open_source(str(directory), baked=True)
    # From here on the Hub's client shows its own progress.
    doing("")
    with hub_failure(f"upload to {repo} broke off, and nothing was committed", "run the same command again"):
        if not exists:
            api.create_repo(repo, private=private or None, exist_ok=True)
        if revision not in (None, "main") and present is None and not create_pr:
            api.create_branch(repo, branch=revision, exist_ok=True)
        # create_commit and not upload_folder, which may split its work into many commits.
        commit = api.create_commit(
            repo,
            [
                *(CommitOperationDelete(path_in_repo=name) for name in leftovers),
                *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=directory / name) for name in files),
            ],
            commit_message=message or default_message(source),
            revision=revision,
            create_pr=create_pr,
        )
    with hub_failure(f"{repo} has the commit {commit.oid}, but cannot be listed", "look at it on the Hub"):
        arrived = set(api.list_repo_files(repo, revision=commit.oid))
    lost = sorted(set(files) - arrived)
    if lost:
        raise InputError(
            f"{repo} has the commit {commit.oid}, but the Hub left out {', '.join(lost)}: its .gitignore names them; "
            "remove that file there and push again"
        )
    return Pushed(
        repo=repo,
        commit=commit.oid,
        url=f"{api.endpoint}/{repo}",
        auto_class=auto_class(architecture_of(source.config, source.name)),
        files=files,
        left_out=left_out,
        removed=leftovers,
        pull_request=commit.pr_url,
    )


def default_message(source: Source) -> str:
    """The commit's message."""
    return f"Layer-specific RoPE scaling ({source.family.prefix}, {source.num_hidden_layers} layers) by lpes-bake"


def checkpoint_files(directory: Path) -> tuple[list[str], list[str]]:
    """The checkpoint's own files, and the others (hidden ones aside); each as a path relative to `directory`."""
    source = open_source(str(directory), baked=True)
    own = {path.relative_to(source.path).as_posix() for path in weight_files(source.path)} | set(source.family.files)
    sent, left_out = [], []
    for folder, subfolders, names in os.walk(directory):
        subfolders[:] = [name for name in subfolders if not is_hidden(name)]
        for name in names:
            path = Path(folder, name)
            full = path.relative_to(directory).as_posix()
            if is_hidden(full):
                continue
            kind = path.suffix.lower()
            known = kind in SENT_SUFFIXES or SENT_NAMES.fullmatch(name) is not None
            if full in own or (known and kind not in WEIGHT_SUFFIXES and path.is_file()):
                sent.append(full)
            else:
                left_out.append(full)
    return sorted(sent), sorted(left_out)


def check_secrets(directory: Path, files: list[str]) -> None:
    """InputError when a text file to be sent holds something that looks like an access token of the Hub."""
    for name in files:
        if Path(name).suffix.lower() not in WEIGHT_SUFFIXES and ACCESS_TOKEN.search((directory / name).read_bytes()):
            raise InputError(f"{name} holds what looks like an access token of the Hub: remove it from {directory}")


def check_card(directory: Path, repo: str) -> None:
    """InputError unless there is a card whose metadata can be read, for another repository than its base's."""
    card = directory / "README.md"
    if not card.is_file():
        raise InputError(f"{directory} has no README.md, and the Hub shows it as the model card: export writes one")
    validate_card(card)
    from huggingface_hub import ModelCard

    base = ModelCard(card.read_text(encoding="utf-8")).data.get("base_model")
    names = base if isinstance(base, list) else [base or ""]
    if repo.lower() in [str(name).lower() for name in names]:  # the Hub tells no capitals apart
        raise InputError(f"{repo} is the base model's own repository: choose another name for the baked one")


def check_card_on_hub(api: Any, directory: Path) -> None:
    """InputError when the Hub itself objects to the card's metadata."""
    # ModelCard.validate asks huggingface.co, whatever HF_ENDPOINT says, before huggingface_hub 1.0.
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    content = (directory / "README.md").read_text(encoding="utf-8")
    with hub_failure("the Hub cannot be asked about the model card", "try again"):
        response = get_session().post(
            f"{api.endpoint}/api/validate-yaml",
            json={"repoType": "model", "content": content},
            headers=build_hf_headers(),
        )
        if response.status_code == 400:
            reasons = "; ".join(str(item.get("message")) for item in response.json().get("errors", []))
            raise InputError(f"README.md: the Hub refuses its metadata: {reasons}; mend the block at its top")
        response.raise_for_status()


def check_account(api: Any, repo: str, private: bool, create_pr: bool) -> tuple[str, bool]:
    """The full name of the repository, and whether it exists. InputError unless this login may write there."""
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(f"{repo!r} is no valid name on the Hub (name or namespace/name): {flat(error)}") from error
    with hub_failure("the Hub cannot be asked who you are", "check the connection and the login (`hf auth login`)"):
        try:
            account = api.whoami()
        except LocalTokenNotFoundError:
            raise InputError("not logged in to the Hub: run `hf auth login`, with a token that may write") from None
    user = str(account["name"])
    token = (account.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise InputError(f"the Hub login of {user} may only read: run `hf auth login` with a token that may write")
    if "/" not in repo:
        repo = f"{user}/{repo}"
    namespace = repo.partition("/")[0]
    own = namespace in {user, *(org.get("name") for org in account.get("orgs") or [])}
    with hub_failure(f"{repo} cannot be looked up", "try again"):
        try:
            info = api.model_info(repo)
        except RepositoryNotFoundError:
            info = None
    if not own and (info is None or not create_pr):
        hint = "" if info is None else ", or open a pull request with --create-pr"
        raise InputError(f"{user} may not write to {namespace} on the Hub: choose a name below {user}{hint}")
    if info is not None and private and not info.private:
        raise InputError(f"{repo} exists and is public: make it private in its settings first, or choose another name")
    return repo, info is not None


def list_branch(api: Any, repo: str, revision: str | None) -> list[str] | None:
    """The files of a branch; None when there is no such branch yet."""
    from huggingface_hub.errors import RevisionNotFoundError

    with hub_failure(f"{repo} cannot be listed", "check that you may read it"):
        try:
            return list(api.list_repo_files(repo, revision=revision))
        except RevisionNotFoundError:
            return None


def stale_files(present: list[str], files: list[str]) -> list[str]:
    """Files of an earlier push that a loader would take for part of this model: old shards, adapters, code."""
    kinds = (*WEIGHT_SUFFIXES, ".py", ".index.json")
    loaded = (name for name in present if "/" not in name and (name.endswith(kinds) or name in ADAPTER_FILES))
    return sorted(set(loaded) - set(files))


@contextmanager
def hub_failure(what: str, mend: str) -> Iterator[None]:
    """Turn whatever the Hub's client raises into one line: what failed, why, and what to do."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The client's own base class: httpx's error or requests', depending on its version.
    transport: Any = HfHubHTTPError.__bases__[0]
    try:
        yield
    except InputError:
        raise
    except OfflineModeIsEnabled as error:
        raise InputError(f"{what}: HF_HUB_OFFLINE is set; unset it") from error
    except (transport, OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} ({flat(error)}); {mend}") from error


def flat(error: BaseException) -> str:
    """An error's message on one line, with the server's reason, and without addresses: some are signed."""
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    text = re.sub(r"\s*(for url:?|at:)?\s*'?https?://\S+", "", f"{cause}")
    text = re.sub(r"\s*\(Request ID:[^)]*\)|For more information check:", "", text)
    return " ".join(text.split())[:300] or type(cause).__name__
