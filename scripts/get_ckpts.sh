#!/usr/bin/env bash
# Downloads published checkpoints into ckpts/ in the published layout. A second call resumes an interrupted download.
# Usage: bash scripts/get_ckpts.sh NAME...
#        NAME: anole lumina_mgpt llamagen llamagen2 llamagen_c2i janus_pro emu3 glm_image simplear liquid
#        REVISION=... pins the revision of the target; FILE=c2i_B_256.pt selects another file for llamagen_c2i;
#        PIXELS=1 fetches what makes pixels of codes too: the diffusion model of glm_image, simplear's decoder.
#        HF=... names the hub's command line client (default: .venv/bin/hf).
# For gated repositories, accept the licence on their page and run `hf auth login`. ckpts/README.md lists all files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,8s/^# //p' "${BASH_SOURCE[0]}"; }

hf=${HF:-.venv/bin/hf}
get() { # REPOSITORY FOLDER [FILE...]: downloads these files, or all
    "$hf" download "$1" --local-dir "$2" "${@:3}"
}
target() { # the same, at $REVISION
    get "$@" ${REVISION:+--revision "$REVISION"}
}
by_hand() { # FOLDER: says which files must be put there by hand, unless they are there
    if [ ! -f "$1/vqgan.ckpt" ]; then
        echo "get_ckpts: put Meta's text_tokenizer.json, vqgan.yaml and vqgan.ckpt into $1" \
            "(the form at https://github.com/facebookresearch/chameleon sends a link by mail)," \
            "or fetch Liquid's copy of its VQGAN, which needs no form and has Chameleon's licence:" \
            "$hf download Junfeng5/Liquid_demo --repo-type space --local-dir ${1%/chameleon/tokenizer}" \
            "chameleon/vqgan.yaml chameleon/vqgan.ckpt" >&2
    fi
}
shared_llamagen() {
    get peizesun/llamagen_t2i ckpts/llamagen vq_ds16_t2i.pt
    get google/flan-t5-xl ckpts/llamagen/t5/flan-t5-xl --include "*.json" --include "*.safetensors" --include spiece.model
}

[ $# -gt 0 ] || { usage >&2; exit 2; }
for name in "$@"; do
    case $name in
        -h | --help) usage; exit 0 ;;
        anole | lumina_mgpt | llamagen | llamagen2 | llamagen_c2i | janus_pro | emu3 | glm_image | simplear | liquid) ;;
        *) echo "get_ckpts: unknown checkpoint $name; choose from anole lumina_mgpt llamagen llamagen2 llamagen_c2i janus_pro emu3 glm_image simplear liquid" >&2; exit 2 ;;
    esac
done
for name in "$@"; do
    case $name in
        anole)
            target leloy/Anole-7b-v0.1-hf ckpts/anole/Anole-7b-v0.1-hf
            get jadohu/anole_drafter ckpts/anole/trained_drafters/anole_drafter
            by_hand ckpts/anole/chameleon/tokenizer
            ;;
        lumina_mgpt)
            target Alpha-VLLM/Lumina-mGPT-7B-768 ckpts/lumina_mgpt/Lumina-mGPT-7B-768
            get sihwanpark/LANTERN-Lumina-mGPT-7B-768 ckpts/lumina_mgpt/trained_drafters/LANTERN-Lumina-mGPT-7B-768
            by_hand ckpts/lumina_mgpt/chameleon/tokenizer
            ;;
        llamagen)
            target jadohu/LlamaGen-T2I ckpts/llamagen/LlamaGen-T2I
            get jadohu/llamagen_drafter ckpts/llamagen/trained_drafters/llamagen_drafter
            shared_llamagen
            ;;
        llamagen2)
            target jadohu/LlamaGen-T2I-2 ckpts/llamagen/LlamaGen-T2I-2
            get jadohu/llamagen2_drafter ckpts/llamagen/trained_drafters/llamagen2_drafter
            shared_llamagen
            ;;
        llamagen_c2i)
            target FoundationVision/LlamaGen ckpts/llamagen "${FILE:-c2i_XL_384.pt}"
            get FoundationVision/LlamaGen ckpts/llamagen vq_ds16_c2i.pt
            ;;
        janus_pro) target deepseek-community/Janus-Pro-1B ckpts/janus_pro/Janus-Pro-1B ;;
        emu3) target BAAI/Emu3-Gen-hf ckpts/emu3/Emu3-Gen-hf ;;
        glm_image) # these two folders generate codes; the others hold the diffusion model, which makes pixels of them
            if [ -n "${PIXELS:-}" ]; then
                target zai-org/GLM-Image ckpts/glm_image/GLM-Image
            else
                target zai-org/GLM-Image ckpts/glm_image/GLM-Image --include "vision_language_encoder/*" --include "processor/*"
            fi
            ;;
        simplear)
            target Daniel0724/SimpleAR-0.5B-RL ckpts/simplear/SimpleAR-0.5B-RL
            if [ -n "${PIXELS:-}" ]; then
                get nvidia/Cosmos-1.0-Tokenizer-DV8x16x16 ckpts/simplear/Cosmos-1.0-Tokenizer-DV8x16x16 decoder.jit
            fi
            ;;
        liquid)
            target Junfeng5/Liquid_V1_7B ckpts/liquid/Liquid_V1_7B
            get Junfeng5/Liquid_demo ckpts/liquid chameleon/vqgan.yaml chameleon/vqgan.ckpt --repo-type space
            echo "get_ckpts: vqgan.ckpt is Meta's, under the Chameleon Research License" >&2
            ;;
    esac
done
