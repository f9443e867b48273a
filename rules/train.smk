# Training. Checkpoints live in an undeclared run directory, so that a killed job goes on from the
# last one; Snakemake knows the finished drafter only.
#
# At a time limit SLURM sends SIGTERM to every process of the job and ends the job once its shell is
# gone. The traps let shell and tee outlive the training, which saves a last checkpoint.


rule train:
    """Train one drafter on the stored hidden states."""
    input:
        identity=f"{RESULTS}/target/identity.json",
        shards=all_shards("features/{source}/{shard}.zarr"),
        manifests=all_shards("features/{source}/{shard}.json"),
        tokens=all_shards("tokens/{source}/{shard}.parquet"),
        start=start_files,
    output:
        multiext(
            f"{RESULTS}/drafters/{{drafter}}/",
            "model.safetensors",
            "config.json",
            "training.json",
        ),
    log:
        f"{RESULTS}/logs/train/{{drafter}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/train/{{drafter}}.tsv"
    conda:
        "../envs/dflash.yaml"
    threads: WORKFLOW.machine.train.threads
    resources:
        gpu=WORKFLOW.machine.train.gpu,
        mem_mb=WORKFLOW.machine.train.mem_mb,
        runtime=minutes("train"),
    params:
        settings=stage("train", of="drafter"),
        machine=machine("train"),
        needs=needs("train"),
        run=lambda wildcards, resources: f"{RESULTS}/runs/{wildcards.drafter}",
        out=lambda wildcards, resources: f"{RESULTS}/drafters/{wildcards.drafter}",
    message:
        "train: drafter {wildcards.drafter}"
    shell:
        "trap : TERM; python -m dflash.launch --gpus {resources.gpu} --needs {params.needs} --"
        " python -m dflash.train --settings {params.settings:q} --machine {params.machine:q}"
        " --identity {input.identity:q} --features {input.manifests:q} --tokens {input.tokens:q}"
        " --name {wildcards.drafter:q} --threads {threads} --runs {params.run:q} --out {params.out:q}"
        " --changed fresh 2>&1"
        " | (trap '' TERM; exec tee {log:q})"
