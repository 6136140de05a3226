"""How traces of several sources become one; `hvdtrain.timeline.merge` is the way in."""
