# From the target model and prompts to stored hidden states.


rule target:
    """Fetch or convert the target model and write down exactly which one it is."""
    input:
        target_files,
    output:
        f"{RESULTS}/target/identity.json",
    log:
        f"{RESULTS}/logs/target.log",
    benchmark:
        f"{RESULTS}/benchmarks/target/target.tsv"
    conda:
        "../envs/dflash.yaml"
    threads: WORKFLOW.machine.target.threads
    resources:
        gpu=0,
        mem_mb=WORKFLOW.machine.target.mem_mb,
        runtime=minutes("target"),
    params:
        settings=stage("target"),
    message:
        f"target: {WORKFLOW.target.model}"
    shell:
        "python -m dflash.target --settings {params.settings:q} --out {output:q} 2>&1 | tee {log:q}"


rule corpus:
    """Read, check, de-duplicate, split and tokenise the prompts of one source."""
    input:
        identity=f"{RESULTS}/target/identity.json",
        prompts=lambda wildcards: SOURCES[wildcards.source].path,
    output:
        prompts=f"{RESULTS}/corpus/{{source}}.parquet",
        stats=f"{RESULTS}/corpus/{{source}}.json",
    log:
        f"{RESULTS}/logs/corpus/{{source}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/corpus/{{source}}.tsv"
    conda:
        "../envs/dflash.yaml"
    threads: WORKFLOW.machine.corpus.threads
    resources:
        gpu=0,
        mem_mb=WORKFLOW.machine.corpus.mem_mb,
        runtime=minutes("corpus"),
    params:
        settings=stage("corpus", of="source"),
    message:
        "corpus: prompts of {wildcards.source}"
    shell:
        "python -m dflash.corpus --settings {params.settings:q} --identity {input.identity:q}"
        " --out {output.prompts:q} --stats {output.stats:q} 2>&1 | tee {log:q}"


rule regenerate:
    """Let the target answer one shard of the training prompts."""
    input:
        identity=f"{RESULTS}/target/identity.json",
        prompts=f"{RESULTS}/corpus/{{source}}.parquet",
    output:
        tokens=f"{RESULTS}/tokens/{{source}}/{{shard}}.parquet",
        stats=f"{RESULTS}/tokens/{{source}}/{{shard}}.json",
    log:
        f"{RESULTS}/logs/regenerate/{{source}}.{{shard}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/regenerate/{{source}}.{{shard}}.tsv"
    conda:
        "../envs/dflash.yaml"
    threads: WORKFLOW.machine.regenerate.threads
    resources:
        gpu=WORKFLOW.machine.regenerate.gpu,
        mem_mb=WORKFLOW.machine.regenerate.mem_mb,
        runtime=minutes("regenerate"),
    params:
        settings=stage("regenerate", of="source"),
        machine=machine("regenerate"),
        needs=needs("regenerate"),
    message:
        "regenerate: the target answers {wildcards.source} {wildcards.shard}"
    shell:
        "python -m dflash.launch --gpus {resources.gpu} --needs {params.needs} --"
        " python -m dflash.regenerate --settings {params.settings:q} --machine {params.machine:q}"
        " --identity {input.identity:q} --prompts {input.prompts:q} --shard {wildcards.shard}"
        " --threads {threads} --out {output.tokens:q} --stats {output.stats:q} 2>&1 | tee {log:q}"


rule extract:
    """Store the hidden states of the tapped layers for one shard."""
    input:
        identity=f"{RESULTS}/target/identity.json",
        tokens=f"{RESULTS}/tokens/{{source}}/{{shard}}.parquet",
    output:
        shard=directory(f"{RESULTS}/features/{{source}}/{{shard}}.zarr"),
        manifest=f"{RESULTS}/features/{{source}}/{{shard}}.json",
    log:
        f"{RESULTS}/logs/extract/{{source}}.{{shard}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/extract/{{source}}.{{shard}}.tsv"
    conda:
        "../envs/dflash.yaml"
    threads: WORKFLOW.machine.extract.threads
    resources:
        gpu=WORKFLOW.machine.extract.gpu,
        mem_mb=WORKFLOW.machine.extract.mem_mb,
        runtime=minutes("extract"),
    params:
        settings=stage("extract"),
        machine=machine("extract"),
        needs=needs("extract"),
        python=lambda wildcards, resources: (
            f"torchrun --standalone --nproc-per-node={max(1, resources.gpu)}"
            if WORKFLOW.machine.extract.parallel == "tensor"
            else "python"
        ),
    message:
        "extract: hidden states of {wildcards.source} {wildcards.shard}"
    shell:
        "python -m dflash.launch --gpus {resources.gpu} --needs {params.needs} --"
        " {params.python} -m dflash.extract --settings {params.settings:q} --machine {params.machine:q}"
        " --identity {input.identity:q} --tokens {input.tokens:q} --threads {threads}"
        " --out {output.shard:q} --manifest {output.manifest:q} 2>&1 | tee {log:q}"
