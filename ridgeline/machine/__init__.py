"""What this machine can do, measured or from data sheets, as `MachineFacts`."""
