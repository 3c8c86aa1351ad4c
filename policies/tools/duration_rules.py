"""Priors of the durations of common tools, which apply before anything has been observed.

The durations are orders of magnitude on a developer's machine, including an agent's overhead per
call. They are guesses, not measurements, and a few observations outweigh them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.policies.base import Rule

OVERHEAD_S = 0.1
"""The agent's overhead per call, such as starting a shell and sending the result, seconds. Every
median includes it."""

# Medians in seconds. A spread of 0.8 in ln X is a factor of 2.2 up or down; 1.5 is a factor of 4.5.
AT_ONCE = Rule(0.15, 0.8)
SEARCH = Rule(0.3, 1.1)
SEARCH_ALL = Rule(3.0, 1.2)
MAINTENANCE = Rule(0.8, 1.4)
QUERY = Rule(0.4, 1.1)
VCS = Rule(0.2, 0.9)
SCRIPT = Rule(0.8, 1.5)
ARCHIVE = Rule(0.5, 1.3)
COMPILE = Rule(0.8, 1.1)
CONFIGURE = Rule(4.0, 1.2)
CHECK = Rule(3.0, 1.1)
NETWORK = Rule(1.5, 1.2)
TRANSFER = Rule(4.0, 1.2)
ONE_TEST = Rule(1.5, 1.0)
TEST_FILE = Rule(2.5, 1.1)
TEST = Rule(6.0, 1.4)
BUILD = Rule(8.0, 1.5)
INSTALL = Rule(12.0, 1.2)
IMAGE = Rule(45.0, 1.3)
SERVER = Rule(60.0, 1.5)
TRAINING = Rule(300.0, 1.5)
END = Rule(300.0, 2.0)

COMMANDS = (
    (
        AT_ONCE,
        """ls, cat, head, tail, wc, echo, printf, pwd, mkdir, rmdir, cp, mv, rm, touch, stat, file,
        which, type, whoami, env, printenv, sed, awk, gawk, cut, sort, uniq, tr, diff, patch,
        chmod, chown, ln, date, ps, kill, pkill, basename, dirname, test, [, [[, false, seq, xxd,
        od, nl, column, jq, yq, id, uname, hostname, df, free, nproc, lsof, readlink, realpath,
        tee, less, more, bat, base64, md5sum, sha256sum, tree, make clean, cargo clean, pip list,
        pip show, pip freeze, npm init, go env, go version, tar -t, zcat, open, goto, scroll_up,
        scroll_down, edit, create, insert, undo_edit, find_file, search_file, search_dir,
        str_replace_editor""",
    ),
    (SEARCH, "grep, egrep, fgrep, rg, ag, ack, find, fd, locate, du, ctags, git grep"),
    (
        QUERY,
        """psql, mysql, sqlite3, redis-cli, mongosh, docker, podman, kubectl, helm, systemctl,
        service, journalctl, conda list, npm ls, npm list, npm view, nvidia-smi, dpkg, apt-cache,
        nslookup, dig, ping, perl, python -c, node -e, ruby -e, php -r""",
    ),
    (VCS, "git, hg, svn, jj"),
    (MAINTENANCE, "git gc, git repack, git fsck, git filter-branch, git bisect, git rebase"),
    (
        SCRIPT,
        """python, node, deno, bun, ruby, php, lua, Rscript, julia, bash, sh, zsh, java, ts-node,
        tsx, swift, scala, cargo run, go run, dotnet run, docker run, podman run""",
    ),
    (
        ARCHIVE,
        "tar, zip, unzip, gzip, gunzip, bzip2, bunzip2, xz, unxz, 7z, zstd, unzstd, rsync, dd",
    ),
    (
        COMPILE,
        """gcc, g++, cc, c++, clang, clang++, ld, ar, rustc, javac, nvcc, protoc, cython, ruff,
        black, isort, prettier, gofmt, rustfmt, shellcheck, cargo fmt, go fmt, go vet""",
    ),
    (CONFIGURE, "cmake, ./configure, meson, autoreconf, go mod, poetry lock, uv lock"),
    (
        CHECK,
        """mypy, pyright, pylint, flake8, eslint, tsc, bandit, npm run lint, npm run typecheck,
        yarn lint, pnpm lint, cargo check, cargo clippy, golangci-lint, pre-commit""",
    ),
    (NETWORK, "curl, wget, http, nc, telnet, ssh, gh, aws, gcloud, az, glab, git ls-remote"),
    (
        TRANSFER,
        """git clone, git fetch, git pull, git push, git submodule, git lfs, scp, sftp,
        docker push, hg clone, svn checkout, huggingface-cli, hf""",
    ),
    (
        TEST,
        """pytest, py.test, unittest, nosetests, jest, vitest, mocha, ctest, phpunit, rspec,
        npm test, npm run test, yarn test, pnpm test, bun test, deno test, go test, make test,
        make check, make tests, python manage.py test, rake, mix test, dotnet test, swift test""",
    ),
    (
        BUILD,
        """make, ninja, bazel, scons, cargo build, cargo test, cargo bench, cargo doc, go build,
        npm run build, yarn build, pnpm build, webpack, vite build, next build, mvn, gradle,
        ./gradlew, ./mvnw, sbt, ant, dotnet build, swift build, stack, cabal, sphinx-build, mkdocs,
        pyinstaller, build, tox, nox, cypress, playwright""",
    ),
    (
        INSTALL,
        """pip install, pip download, pip wheel, pip-compile, uv pip install, uv sync, uv add,
        poetry install, poetry add, pipenv install, pdm install, npm install, npm i, npm ci, yarn,
        yarn install, yarn add, pnpm install, pnpm add, bun install, apt install, apt update,
        apt-get install, apt-get update, apk add, yum install, dnf install, brew install,
        conda install, conda create, mamba install, gem install, bundle install, composer install,
        cargo install, cargo fetch, go get, go install, dotnet restore, docker pull""",
    ),
    (
        IMAGE,
        """docker build, docker buildx, docker compose build, docker compose up, podman build,
        packer, terraform plan, terraform apply, terraform init, helm install, vagrant up""",
    ),
    (
        SERVER,
        """http.server, uvicorn, gunicorn, hypercorn, daphne, flask, streamlit, gradio, jupyter,
        npm start, npm run dev, npm run start, yarn start, yarn dev, pnpm dev, vite, next dev,
        serve, nginx, redis-server, mongod, postgres, rails server, watch, top, htop,
        python manage.py runserver, ngrok, celery, nodemon""",
    ),
    (TRAINING, "torchrun, accelerate, deepspeed, vllm, axolotl, lm_eval"),
    (END, "submit, exit_forfeit"),
)
"""Rules, each with the commands to which it applies. A command may include a subcommand."""
RULES = {name.strip(): rule for rule, names in COMMANDS for name in names.split(",")}
"""The rule of each command, which may include a subcommand."""

_WEB = Rule(3.0, 1.0)
_BROWSER = Rule(1.5, 0.9)
_PERSON = Rule(60.0, 1.5)
_AGENT = Rule(90.0, 1.3)

# Words of a tool's name. The first line with an entry whose words are all in the name decides.
_TOOLS = tuple(
    (frozenset(words.split()), rule)
    for names, rule in (
        ("submit, finish, attempt completion, final answer, terminate, task complete", END),
        ("ask, clarify, human, message user, notify user", _PERSON),
        ("agent, subagent, delegate, handoff, deep research", _AGENT),
        ("web, browse, url, fetch, crawl, scrape, tavily, serper, wikipedia, arxiv", _WEB),
        ("navigate, click, screenshot, scroll, browser, computer, playwright, page", _BROWSER),
        ("image generate, generate image, video", Rule(12.0, 0.8)),
        ("think, plan, todo, memory, remember, note", AT_ONCE),
        ("grep, glob, search, find, list, ls", SEARCH),
        ("read, view, open, cat, edit, write, create, replace, insert, patch, undo, goto", AT_ONCE),
        ("test, tests", TEST),
        ("build, compile", BUILD),
        ("python, ipython, jupyter, notebook, interpreter, code, cell", SCRIPT),
        ("sql, query, database", QUERY),
    )
    for words in names.split(",")
)


def tool_rule(name_parts: Sequence[str]) -> Rule | None:
    """Return the rule for the words of a tool's name, in lower case; None if no rule matches."""
    parts = set(name_parts)
    if parts == {"task"}:
        return _AGENT
    return next((rule for words, rule in _TOOLS if words <= parts), None)
