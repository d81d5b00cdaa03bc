"""What measures. Quoted results are kept in results/ as JSON."""
