"""The published weights of the metrics, at the addresses their authors give."""

GITHUB = "https://github.com"
INCEPTION = (
    f"{GITHUB}/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth"
)
VGG16 = "https://download.pytorch.org/models/vgg16-397923af.pth"
CLIP_OF = {  # LANTERN's name -> repository in open_clip's layout
    "ViT-B/32": "timm/vit_base_patch32_clip_224.openai",
    "ViT-G/14": "laion/CLIP-ViT-g-14-laion2B-s12B-b42K",
}
HPS = "xswu/HPSv2/HPS_v2.1_compressed.pt"
HPS_CLIP = "ViT-H-14"  # the architecture by open_clip's name: nothing to fetch
AESTHETIC = (
    f"{GITHUB}/christophschuhmann/improved-aesthetic-predictor/raw/main/sac+logos+ava1-l14-linearMSE.pth"
)
AESTHETIC_CLIP = "timm/vit_large_patch14_clip_224.openai"
ANY_SOURCE = "a local file, a hub id OWNER/NAME/FILE or an https address"
