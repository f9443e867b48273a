# What a drafter is worth: real decoding, the published checkpoint, the report.

EXPORTED_MORE = (
    ["speculators/config.json", "speculators/model.safetensors"]
    if "speculators" in WORKFLOW.export.formats
    else []
)


rule task:
    """Fetch the prompts of a published task."""
    input:
        identity=f"{RESULTS}/target/identity.json",
    output:
        f"{RESULTS}/tasks/{{task}}.parquet",
    log:
        f"{RESULTS}/logs/task/{{task}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/task/{{task}}.tsv"
    conda:
        "../envs/dflash.yaml"
    threads: WORKFLOW.machine.corpus.threads
    resources:
        gpu=0,
        mem_mb=WORKFLOW.machine.corpus.mem_mb,
        runtime=minutes("corpus"),
    params:
        settings=stage("task", of="task"),
    message:
        "task: prompts of {wildcards.task}"
    shell:
        "python -m dflash.tasks --settings {params.settings:q} --identity {input.identity:q}"
        " --out {output:q} 2>&1 | tee {log:q}"


rule evaluate:
    """Decode a task's prompts with one drafter, at one temperature and block size."""
    input:
        identity=f"{RESULTS}/target/identity.json",
        drafter=f"{RESULTS}/drafters/{{drafter}}/model.safetensors",
        prompts=task_prompts,
    output:
        f"{RESULTS}/evaluate/{{drafter}}/{{task}}{{run}}.json",
    log:
        f"{RESULTS}/logs/evaluate/{{drafter}}.{{task}}{{run}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/evaluate/{{drafter}}.{{task}}{{run}}.tsv"
    conda:
        "../envs/dflash.yaml"
    threads: WORKFLOW.machine.evaluate.threads
    resources:
        gpu=WORKFLOW.machine.evaluate.gpu,
        mem_mb=WORKFLOW.machine.evaluate.mem_mb,
        runtime=minutes("evaluate"),
    params:
        settings=stage("evaluate", of="task"),
        machine=machine("evaluate"),
        needs=needs("evaluate"),
        drafter=lambda wildcards, resources: f"{RESULTS}/drafters/{wildcards.drafter}",
    message:
        "evaluate: {wildcards.drafter} on {wildcards.task}{wildcards.run}"
    shell:
        "python -m dflash.launch --gpus {resources.gpu} --needs {params.needs} --"
        " python -m dflash.evaluate --settings {params.settings:q} --machine {params.machine:q}"
        " --identity {input.identity:q} --drafter {params.drafter:q} --task {wildcards.task:q}"
        " --prompts {input.prompts:q} --threads {threads} --out {output:q} 2>&1 | tee {log:q}"


rule served:
    """Ask a running server the prompts of a task; its acceptance and speed."""
    input:
        identity=f"{RESULTS}/target/identity.json",
        export=f"{RESULTS}/export/{{drafter}}/model.safetensors",  # what it was started with
        prompts=task_prompts,
    output:
        f"{RESULTS}/served/{{drafter}}/{{task}}{{run}}.json",
    log:
        f"{RESULTS}/logs/served/{{drafter}}.{{task}}{{run}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/served/{{drafter}}.{{task}}{{run}}.tsv"
    conda:
        "../envs/dflash.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=WORKFLOW.machine.corpus.mem_mb,
        runtime=minutes("evaluate"),
    params:
        settings=stage("served", of="task"),
    message:
        "served: {wildcards.drafter} on {wildcards.task}{wildcards.run}"
    shell:
        "python -m dflash.served --settings {params.settings:q} --identity {input.identity:q}"
        " --drafter {wildcards.drafter:q} --task {wildcards.task:q} --prompts {input.prompts:q}"
        " --out {output:q} 2>&1 | tee {log:q}"


rule export:
    """Write the drafter as the published checkpoint that serving engines load, with its card."""
    input:
        identity=f"{RESULTS}/target/identity.json",
        drafter=multiext(
            f"{RESULTS}/drafters/{{drafter}}/",
            "model.safetensors",
            "config.json",
            "training.json",
        ),
        evaluations=lambda wildcards: [
            f"{RESULTS}/evaluate/{wildcards.drafter}/{task}{run.name}.json"
            for task in TASKS
            for run in RUNS[wildcards.drafter]
        ],
        corpus=expand(f"{RESULTS}/corpus/{{source}}.json", source=SOURCES),
        tokens=all_shards("tokens/{source}/{shard}.json"),
    output:
        multiext(
            f"{RESULTS}/export/{{drafter}}/",
            "config.json",
            "model.safetensors",
            "README.md",
            *EXPORTED_MORE,
        ),
    log:
        f"{RESULTS}/logs/export/{{drafter}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/export/{{drafter}}.tsv"
    conda:
        "../envs/dflash.yaml"
    threads: WORKFLOW.machine.export.threads
    resources:
        gpu=0,
        mem_mb=WORKFLOW.machine.export.mem_mb,
        runtime=minutes("export"),
    params:
        settings=stage("export"),
        out=lambda wildcards, resources: f"{RESULTS}/export/{wildcards.drafter}",
        drafter=lambda wildcards, resources: f"{RESULTS}/drafters/{wildcards.drafter}",
    message:
        "export: {wildcards.drafter}"
    shell:
        "python -m dflash.export --settings {params.settings:q} --identity {input.identity:q}"
        " --drafter {params.drafter:q} --evaluations {input.evaluations:q}"
        " --corpus {input.corpus:q} --tokens {input.tokens:q}"
        " --out {params.out:q} 2>&1 | tee {log:q}"


rule report:
    """Draw the report and write the summary."""
    input:
        identity=f"{RESULTS}/target/identity.json",
        corpus=expand(f"{RESULTS}/corpus/{{source}}.json", source=SOURCES),
        tokens=all_shards("tokens/{source}/{shard}.json"),
        features=all_shards("features/{source}/{shard}.json"),
        training=expand(f"{RESULTS}/drafters/{{drafter}}/training.json", drafter=WORKFLOW.drafters),
        evaluations=all_runs("evaluate/{drafter}/{task}{run}.json"),
        served=all_served("served/{drafter}/{task}{run}.json"),
        exports=expand(f"{RESULTS}/export/{{drafter}}/config.json", drafter=WORKFLOW.drafters),
    output:
        html=f"{RESULTS}/report.html",
        summary=f"{RESULTS}/summary.json",
    log:
        f"{RESULTS}/logs/report.log",
    benchmark:
        f"{RESULTS}/benchmarks/report/report.tsv"
    conda:
        "../envs/dflash.yaml"
    threads: WORKFLOW.machine.report.threads
    resources:
        gpu=0,
        mem_mb=WORKFLOW.machine.report.mem_mb,
        runtime=minutes("report"),
    params:
        settings=stage("report"),
        benchmarks=lambda wildcards, resources: current_benchmarks(),
    message:
        "report"
    shell:
        "python -m dflash.report --settings {params.settings:q} --identity {input.identity:q}"
        " --corpus {input.corpus:q} --tokens {input.tokens:q} --features {input.features:q}"
        " --training {input.training:q} --evaluations {input.evaluations:q}"
        " --served {input.served:q} --exports {input.exports:q} --benchmarks {params.benchmarks:q}"
        " --html {output.html:q} --summary {output.summary:q} 2>&1 | tee {log:q}"
