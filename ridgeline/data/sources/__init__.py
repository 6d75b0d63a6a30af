"""The sources that ship with Ridgeline, one file each; `ridgeline.data.build.SOURCES` names them."""
