# What all rules share: the checked settings, their names as wildcards, and the lock.
import fcntl
import os
from pathlib import Path

from snakemake.exceptions import WorkflowError

from dflash import config as settings
from dflash.errors import UserError, explain_oserror

try:
    WORKFLOW = settings.load(config)
except UserError as e:
    raise WorkflowError(f"settings refused: {e}") from None

RESULTS, TASKS = WORKFLOW.results, WORKFLOW.evaluate.tasks

# Asked here, since Snakemake is content with old results whose inputs have gone.
for name, path in [
    *((f"corpus.sources: {s.name}", s.path) for s in WORKFLOW.corpus.sources),
    *((f"evaluate.tasks: {n}", t.path) for n, t in TASKS.items() if t.path and not t.dataset),
]:
    if not Path(path).is_file():
        raise WorkflowError(f"{name}: there is no file {path}; correct its `path`")
for name, task in TASKS.items():
    if task.dataset and task.path and not Path(task.path).is_dir():
        raise WorkflowError(
            f"evaluate.tasks: {name}: there is no folder {task.path}; correct its `path`"
        )

# Asked here, since the drafter that another starts from is needed only hours later.
for name, drafter in WORKFLOW.drafters.items():
    if settings.is_folder(drafter.start):
        from dflash.drafter import read_drafter_config  # torch, which nothing else here needs

        try:
            facts, where = settings.target_facts(WORKFLOW.target), f"drafters.{name}"
            settings.check_start(drafter, facts, read_drafter_config(drafter.start), where)
        except UserError as e:
            raise WorkflowError(f"settings refused: {e}") from None

# Asked here, since Snakemake itself would end in a traceback when it looks for outputs there.
above = next(path for path in (Path(RESULTS), *Path(RESULTS).absolute().parents) if path.exists())
if not above.is_dir() or not os.access(above, os.W_OK):
    raise WorkflowError(
        f"results: {above} is {'not writable' if above.is_dir() else 'a file, not a folder'}; set"
        " `results:` to a folder you may write"
    )

SOURCES = {source.name: source for source in WORKFLOW.corpus.sources}
RUNS = {drafter: settings.runs(WORKFLOW, drafter) for drafter in WORKFLOW.drafters}
# A server has the block size that it was started with.
SERVED = [settings.Run(t) for t in WORKFLOW.evaluate.temperatures if WORKFLOW.evaluate.server]
EVERY_RUN = {run.name: run for run in [*sum(RUNS.values(), []), *SERVED]}


wildcard_constraints:
    source="|".join(map(re.escape, SOURCES)),
    drafter="|".join(map(re.escape, WORKFLOW.drafters)),
    task="|".join(map(re.escape, TASKS)),
    run=f"(?:{'|'.join(map(re.escape, EVERY_RUN))})",  # empty is a name, of the default run
    shard=r"\d{5}-of-\d{5}",


def stage(name, of=None):
    """Params function: canonical JSON of what decides a job's result. Snakemake tracks it."""
    return lambda wildcards: settings.stage_settings(
        WORKFLOW,
        name,
        wildcards[of] if of else "",
        EVERY_RUN[wildcards.run] if "run" in wildcards.keys() else None,
    )


def machine(name):
    """Params function: how a stage runs. A function of `resources` is not tracked, so that GPUs,
    batch sizes and time limits rerun nothing."""
    return lambda wildcards, resources: settings.machine_settings(WORKFLOW, name)


def needs(name):
    """Params function: the GPUs a stage was configured with, before any clamping."""
    return lambda wildcards, resources: getattr(WORKFLOW.machine, name).gpu


def minutes(name):
    """Resources function: the time limit, growing with each retry."""
    return lambda wildcards, attempt: getattr(WORKFLOW.machine, name).runtime * attempt


def all_shards(pattern):
    """The files of all shards of all sources."""
    return [
        f"{RESULTS}/{pattern}".format(source=name, shard=shard)
        for name, source in SOURCES.items()
        for shard in settings.shard_names(source.shards)
    ]


def all_runs(pattern):
    """The files of all drafters on all tasks, at every temperature and block size."""
    return [
        f"{RESULTS}/{pattern}".format(drafter=drafter, task=task, run=run.name)
        for drafter in WORKFLOW.drafters
        for task in TASKS
        for run in RUNS[drafter]
    ]


def all_served(pattern):
    """The files of the served drafter on all tasks, at every temperature; none without a server."""
    server = WORKFLOW.evaluate.server
    drafter = (server and server.drafter) or next(iter(WORKFLOW.drafters))
    return [
        f"{RESULTS}/{pattern}".format(drafter=drafter, task=task, run=run.name)
        for task in TASKS
        for run in SERVED
    ]


def task_prompts(wildcards):
    """The file or files that hold a task's prompts."""
    task = TASKS[wildcards.task]
    if task.dataset:
        return f"{RESULTS}/tasks/{wildcards.task}.parquet"
    return task.path or expand(f"{RESULTS}/corpus/{{source}}.parquet", source=SOURCES)


def target_files(wildcards):
    """The files of a target in a local folder: a model replaced in place must be noticed."""
    if not settings.is_folder(WORKFLOW.target.model):
        return []
    kinds = {".safetensors", ".json", ".jinja", ".model", ".txt"}
    folder = Path(WORKFLOW.target.model).expanduser()
    return sorted(str(path) for path in folder.iterdir() if path.suffix in kinds)


def start_files(wildcards):
    """The files of the drafter that a drafter starts from, where it lies in a folder."""
    folder = WORKFLOW.drafters[wildcards.drafter].start
    if not settings.is_folder(folder):
        return []
    kinds = {".safetensors", ".json"}
    return sorted(str(path) for path in Path(folder).iterdir() if path.suffix in kinds)


def current_benchmarks():
    """The benchmark files of the jobs that made what the report shows, and of no earlier ones."""
    return [
        f"{RESULTS}/benchmarks/target/target.tsv",
        *expand(f"{RESULTS}/benchmarks/corpus/{{source}}.tsv", source=SOURCES),
        *all_shards("benchmarks/regenerate/{source}.{shard}.tsv"),
        *all_shards("benchmarks/extract/{source}.{shard}.tsv"),
        *expand(f"{RESULTS}/benchmarks/train/{{drafter}}.tsv", drafter=WORKFLOW.drafters),
        *expand(
            f"{RESULTS}/benchmarks/task/{{task}}.tsv",
            task=[name for name, task in TASKS.items() if task.dataset],
        ),
        *all_runs("benchmarks/evaluate/{drafter}.{task}{run}.tsv"),
        *all_served("benchmarks/served/{drafter}.{task}{run}.tsv"),
        *expand(f"{RESULTS}/benchmarks/export/{{drafter}}.tsv", drafter=WORKFLOW.drafters),
    ]


onstart:
    # Snakemake's own lock outlives a killed run and then wants --unlock (the profiles turn it off);
    # this one is held by the kernel for exactly as long as this process lives.
    try:
        Path(RESULTS).mkdir(parents=True, exist_ok=True)
        workflow.dflash_lock = open(f"{RESULTS}/.lock", "w")
    except OSError as e:
        raise WorkflowError(f"results folder {RESULTS}: {explain_oserror(e)}") from None
    try:
        fcntl.flock(workflow.dflash_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WorkflowError(
            f"another snakemake run is working on {RESULTS}; wait for it or stop it"
        ) from None
