llvm.func @add_bf16(%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64) {
    %c0 = arith.constant 1 : i64
    %c1 = arith.constant 0 : i64
    %c2 = arith.constant -32 : i64
    %c3 = arith.constant -8 : i64
    %c4 = arith.constant 32 : i64
    %c5 = arith.constant 8 : i64
    %c6 = arith.constant 16 : i64
    %c7 = arith.constant 24 : i64
    %c8 = arith.constant dense<16> : vector<8xi32>
    %c9 = arith.constant dense<1> : vector<8xi32>
    %c10 = arith.constant dense<32767> : vector<8xi32>
    %c11 = arith.constant dense<2143289344> : vector<8xi32>
    %c12 = arith.constant dense<[0, 1, 2, 3, 4, 5, 6, 7]> : vector<8xi32>
    %c13 = arith.constant dense<1> : vector<8xi16>
    %0 = llvm.getelementptr %ints[0] : (!llvm.ptr) -> !llvm.ptr, i64
    %1 = llvm.load %0 : !llvm.ptr -> i64
    %2 = llvm.getelementptr %ptrs[0] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %3 = llvm.load %2 : !llvm.ptr -> !llvm.ptr
    %4 = llvm.getelementptr %ptrs[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %5 = llvm.load %4 : !llvm.ptr -> !llvm.ptr
    %6 = llvm.getelementptr %ptrs[2] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %7 = llvm.load %6 : !llvm.ptr -> !llvm.ptr
    %8 = arith.subi %end, %begin : i64
    %9 = arith.andi %8, %c2 : i64
    %10 = arith.andi %8, %c3 : i64
    %11 = arith.addi %begin, %9 : i64
    %12 = arith.addi %begin, %10 : i64
    scf.for %13 = %begin to %11 step %c4 : i64 {
      %14 = arith.addi %13, %c5 : i64
      %15 = arith.addi %13, %c6 : i64
      %16 = arith.addi %13, %c7 : i64
      %17 = llvm.getelementptr nusw %3[%13] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      %18 = llvm.load %17 {alignment = 2 : i64} : !llvm.ptr -> vector<8xi16>
      %19 = arith.extui %18 : vector<8xi16> to vector<8xi32>
      %20 = arith.shli %19, %c8 : vector<8xi32>
      %21 = arith.bitcast %20 : vector<8xi32> to vector<8xf32>
      %22 = llvm.getelementptr nusw %3[%14] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      %23 = llvm.load %22 {alignment = 2 : i64} : !llvm.ptr -> vector<8xi16>
      %24 = arith.extui %23 : vector<8xi16> to vector<8xi32>
      %25 = arith.shli %24, %c8 : vector<8xi32>
      %26 = arith.bitcast %25 : vector<8xi32> to vector<8xf32>
      %27 = llvm.getelementptr nusw %3[%15] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      %28 = llvm.load %27 {alignment = 2 : i64} : !llvm.ptr -> vector<8xi16>
      %29 = arith.extui %28 : vector<8xi16> to vector<8xi32>
      %30 = arith.shli %29, %c8 : vector<8xi32>
      %31 = arith.bitcast %30 : vector<8xi32> to vector<8xf32>
      %32 = llvm.getelementptr nusw %3[%16] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      %33 = llvm.load %32 {alignment = 2 : i64} : !llvm.ptr -> vector<8xi16>
      %34 = arith.extui %33 : vector<8xi16> to vector<8xi32>
      %35 = arith.shli %34, %c8 : vector<8xi32>
      %36 = arith.bitcast %35 : vector<8xi32> to vector<8xf32>
      %37 = llvm.getelementptr nusw %5[%13] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      %38 = llvm.load %37 {alignment = 2 : i64} : !llvm.ptr -> vector<8xi16>
      %39 = arith.extui %38 : vector<8xi16> to vector<8xi32>
      %40 = arith.shli %39, %c8 : vector<8xi32>
      %41 = arith.bitcast %40 : vector<8xi32> to vector<8xf32>
      %42 = llvm.getelementptr nusw %5[%14] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      %43 = llvm.load %42 {alignment = 2 : i64} : !llvm.ptr -> vector<8xi16>
      %44 = arith.extui %43 : vector<8xi16> to vector<8xi32>
      %45 = arith.shli %44, %c8 : vector<8xi32>
      %46 = arith.bitcast %45 : vector<8xi32> to vector<8xf32>
      %47 = llvm.getelementptr nusw %5[%15] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      %48 = llvm.load %47 {alignment = 2 : i64} : !llvm.ptr -> vector<8xi16>
      %49 = arith.extui %48 : vector<8xi16> to vector<8xi32>
      %50 = arith.shli %49, %c8 : vector<8xi32>
      %51 = arith.bitcast %50 : vector<8xi32> to vector<8xf32>
      %52 = llvm.getelementptr nusw %5[%16] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      %53 = llvm.load %52 {alignment = 2 : i64} : !llvm.ptr -> vector<8xi16>
      %54 = arith.extui %53 : vector<8xi16> to vector<8xi32>
      %55 = arith.shli %54, %c8 : vector<8xi32>
      %56 = arith.bitcast %55 : vector<8xi32> to vector<8xf32>
      %57 = arith.addf %21, %41 : vector<8xf32>
      %58 = arith.addf %26, %46 : vector<8xf32>
      %59 = arith.addf %31, %51 : vector<8xf32>
      %60 = arith.addf %36, %56 : vector<8xf32>
      %61 = arith.bitcast %57 : vector<8xf32> to vector<8xi32>
      %62 = arith.shrui %61, %c8 : vector<8xi32>
      %63 = arith.andi %62, %c9 : vector<8xi32>
      %64 = arith.addi %63, %c10 : vector<8xi32>
      %65 = arith.addi %61, %64 : vector<8xi32>
      %66 = arith.cmpf uno, %57, %57 : vector<8xf32>
      %67 = arith.select %66, %c11, %65 : vector<8xi1>, vector<8xi32>
      %68 = arith.shrui %67, %c8 : vector<8xi32>
      %69 = arith.trunci %68 : vector<8xi32> to vector<8xi16>
      %70 = llvm.getelementptr nusw %7[%13] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      llvm.store %69, %70 {alignment = 2 : i64} : vector<8xi16>, !llvm.ptr
      %71 = arith.bitcast %58 : vector<8xf32> to vector<8xi32>
      %72 = arith.shrui %71, %c8 : vector<8xi32>
      %73 = arith.andi %72, %c9 : vector<8xi32>
      %74 = arith.addi %73, %c10 : vector<8xi32>
      %75 = arith.addi %71, %74 : vector<8xi32>
      %76 = arith.cmpf uno, %58, %58 : vector<8xf32>
      %77 = arith.select %76, %c11, %75 : vector<8xi1>, vector<8xi32>
      %78 = arith.shrui %77, %c8 : vector<8xi32>
      %79 = arith.trunci %78 : vector<8xi32> to vector<8xi16>
      %80 = llvm.getelementptr nusw %7[%14] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      llvm.store %79, %80 {alignment = 2 : i64} : vector<8xi16>, !llvm.ptr
      %81 = arith.bitcast %59 : vector<8xf32> to vector<8xi32>
      %82 = arith.shrui %81, %c8 : vector<8xi32>
      %83 = arith.andi %82, %c9 : vector<8xi32>
      %84 = arith.addi %83, %c10 : vector<8xi32>
      %85 = arith.addi %81, %84 : vector<8xi32>
      %86 = arith.cmpf uno, %59, %59 : vector<8xf32>
      %87 = arith.select %86, %c11, %85 : vector<8xi1>, vector<8xi32>
      %88 = arith.shrui %87, %c8 : vector<8xi32>
      %89 = arith.trunci %88 : vector<8xi32> to vector<8xi16>
      %90 = llvm.getelementptr nusw %7[%15] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      llvm.store %89, %90 {alignment = 2 : i64} : vector<8xi16>, !llvm.ptr
      %91 = arith.bitcast %60 : vector<8xf32> to vector<8xi32>
      %92 = arith.shrui %91, %c8 : vector<8xi32>
      %93 = arith.andi %92, %c9 : vector<8xi32>
      %94 = arith.addi %93, %c10 : vector<8xi32>
      %95 = arith.addi %91, %94 : vector<8xi32>
      %96 = arith.cmpf uno, %60, %60 : vector<8xf32>
      %97 = arith.select %96, %c11, %95 : vector<8xi1>, vector<8xi32>
      %98 = arith.shrui %97, %c8 : vector<8xi32>
      %99 = arith.trunci %98 : vector<8xi32> to vector<8xi16>
      %100 = llvm.getelementptr nusw %7[%16] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      llvm.store %99, %100 {alignment = 2 : i64} : vector<8xi16>, !llvm.ptr
    }
    scf.for %101 = %11 to %12 step %c5 : i64 {
      %102 = llvm.getelementptr nusw %3[%101] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      %103 = llvm.load %102 {alignment = 2 : i64} : !llvm.ptr -> vector<8xi16>
      %104 = arith.extui %103 : vector<8xi16> to vector<8xi32>
      %105 = arith.shli %104, %c8 : vector<8xi32>
      %106 = arith.bitcast %105 : vector<8xi32> to vector<8xf32>
      %107 = llvm.getelementptr nusw %5[%101] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      %108 = llvm.load %107 {alignment = 2 : i64} : !llvm.ptr -> vector<8xi16>
      %109 = arith.extui %108 : vector<8xi16> to vector<8xi32>
      %110 = arith.shli %109, %c8 : vector<8xi32>
      %111 = arith.bitcast %110 : vector<8xi32> to vector<8xf32>
      %112 = arith.addf %106, %111 : vector<8xf32>
      %113 = arith.bitcast %112 : vector<8xf32> to vector<8xi32>
      %114 = arith.shrui %113, %c8 : vector<8xi32>
      %115 = arith.andi %114, %c9 : vector<8xi32>
      %116 = arith.addi %115, %c10 : vector<8xi32>
      %117 = arith.addi %113, %116 : vector<8xi32>
      %118 = arith.cmpf uno, %112, %112 : vector<8xf32>
      %119 = arith.select %118, %c11, %117 : vector<8xi1>, vector<8xi32>
      %120 = arith.shrui %119, %c8 : vector<8xi32>
      %121 = arith.trunci %120 : vector<8xi32> to vector<8xi16>
      %122 = llvm.getelementptr nusw %7[%101] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      llvm.store %121, %122 {alignment = 2 : i64} : vector<8xi16>, !llvm.ptr
    }
    %123 = arith.subi %end, %12 : i64
    %124 = arith.trunci %123 : i64 to i32
    %125 = vector.broadcast %124 : i32 to vector<8xi32>
    %126 = arith.cmpi slt, %c12, %125 : vector<8xi32>
    %127 = arith.cmpi sgt, %123, %c1 : i64
    scf.if %127 {
      %128 = llvm.getelementptr nusw %3[%12] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      %129 = llvm.intr.masked.load %128, %126, %c13 {alignment = 2 : i32} : (!llvm.ptr, vector<8xi1>, vector<8xi16>) -> vector<8xi16>
      %130 = arith.extui %129 : vector<8xi16> to vector<8xi32>
      %131 = arith.shli %130, %c8 : vector<8xi32>
      %132 = arith.bitcast %131 : vector<8xi32> to vector<8xf32>
      %133 = llvm.getelementptr nusw %5[%12] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      %134 = llvm.intr.masked.load %133, %126, %c13 {alignment = 2 : i32} : (!llvm.ptr, vector<8xi1>, vector<8xi16>) -> vector<8xi16>
      %135 = arith.extui %134 : vector<8xi16> to vector<8xi32>
      %136 = arith.shli %135, %c8 : vector<8xi32>
      %137 = arith.bitcast %136 : vector<8xi32> to vector<8xf32>
      %138 = arith.addf %132, %137 : vector<8xf32>
      %139 = arith.bitcast %138 : vector<8xf32> to vector<8xi32>
      %140 = arith.shrui %139, %c8 : vector<8xi32>
      %141 = arith.andi %140, %c9 : vector<8xi32>
      %142 = arith.addi %141, %c10 : vector<8xi32>
      %143 = arith.addi %139, %142 : vector<8xi32>
      %144 = arith.cmpf uno, %138, %138 : vector<8xf32>
      %145 = arith.select %144, %c11, %143 : vector<8xi1>, vector<8xi32>
      %146 = arith.shrui %145, %c8 : vector<8xi32>
      %147 = arith.trunci %146 : vector<8xi32> to vector<8xi16>
      %148 = llvm.getelementptr nusw %7[%12] : (!llvm.ptr, i64) -> !llvm.ptr, i16
      llvm.intr.masked.store %147, %148, %126 {alignment = 2 : i32} : vector<8xi16>, vector<8xi1> into !llvm.ptr
    }
    llvm.return
}
