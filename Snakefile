# Train DFlash drafters for a target model: from prompts to a report on real decoding.
#
#   target -> corpus -> regenerate -> extract -> train -> evaluate -> export -> report
#
# Every rule calls one Python entrypoint of the package `dflash`; the settings are those of
# dflash/config.py. Rules live in rules/, one file a group of stages.
from snakemake.utils import min_version

min_version("9.20")

if not config:  # no --configfile: the demo

    configfile: "config/config.yaml"


include: "rules/common.smk"
include: "rules/data.smk"
include: "rules/train.smk"
include: "rules/results.smk"


rule all:
    default_target: True
    input:
        f"{RESULTS}/report.html",
        f"{RESULTS}/summary.json",
        expand(f"{RESULTS}/export/{{drafter}}/model.safetensors", drafter=WORKFLOW.drafters),
